"""fp16 and bf16 at once."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed, set_to
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding


class BothHalfPrecisions(Rule):
    name = "both_half_precisions"
    rests_on = "documentation: TrainingArguments._validate_args (transformers 5.23)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if not (subject.on("training.fp16") and subject.on("training.bf16")):
            return
        if subject.framework == "axolotl":       # core/builders/base.py: fp16 is passed on only where bf16 is not
            yield cls.found("low", "fp16 beside bf16 does nothing", "Axolotl takes fp16 only where bf16 is off, which `bf16: "
                            "auto` finds out by itself", subject.settings["training.fp16"], subject.settings["training.bf16"],
                            expected=Expected("nothing changes", "none"), cure=Cure("Leave fp16 out",
                                                                                    removed(subject, "training.fp16")))
        else:
            yield cls.found("critical", "fp16 and bf16 together", "A product is computed in one type; the trainer raises "
                            "\"At most one of fp16 and bf16 can be True\"", subject.settings["training.fp16"],
                            subject.settings["training.bf16"], expected=Expected("the run starts", "none"),
                            cure=Cure("Keep bf16 where the hardware has it, else fp16", set_to(subject, "training.fp16",
                                                                                               False)))
