"""Training examples in the order of the file, the same one in every epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_argument
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Loop, Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

ORDERED_OTHERWISE = ("sampler", "batch_sampler")
DRAWS = ("IterableDataset", ".shuffle(", "streaming=True", "randint", "randperm", "random.")


class LoaderNotShuffled(Rule):
    name = "loader_not_shuffled"
    rests_on = "documentation: torch.utils.data.DataLoader (shuffle=False is the default)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or any(word in script.text for word in DRAWS):
            return
        call = next((call for loop in script.training_loops if (call := _loader(script, loop)) is not None), None)
        if call is None or len(call.args) > 2:
            return
        if any(item.arg is None or item.arg in ORDERED_OTHERWISE for item in call.keywords):
            return
        shuffle = next((item.value for item in call.keywords if item.arg == "shuffle"), None)
        if shuffle is not None and not (isinstance(shuffle, ast.Constant) and not shuffle.value):
            return
        yield cls.found(
            "moderate", "training data is not shuffled", "Every epoch goes through the examples in the order of the file: "
            "batches of neighbours are alike, and the last ones count most", script.evidence(call), expected=NO_SPEED,
            risk=Risk("none", "low", "low"), cure=Cure("Pass shuffle=True", with_argument(script, call, "shuffle", "True")))


def _loader(script: Script, loop: Loop) -> ast.Call | None:
    """The DataLoader that a training loop goes over."""
    if isinstance(loop, ast.While):
        return None
    names = {item.id for item in ast.walk(loop.iter) if isinstance(item, ast.Name)}
    for node in ast.walk(script.tree):
        if (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
                and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
                and script.name(node.value.func) == "torch.utils.data.DataLoader"):
            return node.value
    return None
