"""For each rule on methods that a project writes for a library's class: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF

OWN = HEAD + HF + ARGUMENTS + ("class Own(Trainer):\n    def {method}:\n        return super().training_step(model, inputs)\n"
                               "Own(model, args, train_dataset=rows).train()\n")
# rule -> (a script where it fires, its near miss)
LIBRARY_CASES: dict[str, tuple[str, str]] = {
    "method_of_older_release": (OWN.format(method="training_step(self, model, inputs)"),
                                OWN.format(method="training_step(self, model, inputs, *args)")),
}
