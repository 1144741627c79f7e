"""The best checkpoint asked for at intervals at which it cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import TRAINERS, interval_steps, seen, value
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding


class BestCheckpointIntervals(Rule):
    name = "best_checkpoint_intervals"
    rests_on = "documentation: TrainingArguments._validate_args"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework not in TRAINERS or not subject.on("training.load_best_model_at_end"):
            return
        asked = subject.settings["training.load_best_model_at_end"]
        evaluating, saving = value(subject, "training.eval_strategy"), value(subject, "training.save_strategy")
        if None in (evaluating, saving) or saving == "best":
            return
        starts = Expected("the run starts", "none")
        if evaluating != saving:
            yield cls.found("critical", "load_best_model_at_end without matching strategies", "It is evaluated by "
                            f"{evaluating!r} and saved by {saving!r}; the trainer raises, because what is saved has no score",
                            asked,
                            seen(subject, "training.eval_strategy"), seen(subject, "training.save_strategy"), expected=starts,
                            cure=Cure(f"Set eval_strategy={saving!r}", set_to(subject, "training.eval_strategy", saving)))
            return
        every, kept = interval_steps(subject, "eval", None), interval_steps(subject, "save", None)
        if every and kept and kept % every:
            yield cls.found("critical", "save_steps is no multiple of eval_steps", f"Checkpoints every {kept:g} steps and "
                            f"scores every {every:g}: with load_best_model_at_end the trainer raises",
                            asked, seen(subject, "training.eval_steps"),
                            seen(subject, "training.save_steps"), expected=starts,
                            cure=Cure(f"Save every {-(-kept // every) * every:g} steps",
                                      set_to(subject, "training.save_steps", int(-(-kept // every) * every))))
