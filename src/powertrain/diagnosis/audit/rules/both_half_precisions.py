"""fp16 and bf16 at once."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.audit.editing import set_to
from powertrain.diagnosis.audit.rules.base import Circumstances, Rule
from powertrain.diagnosis.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding


class BothHalfPrecisions(Rule):
    name = "both_half_precisions"
    rests_on = "documentation: TrainingArguments._validate_args (transformers 5.23)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.on("training.fp16") and subject.on("training.bf16"):
            yield cls.found("critical", "fp16 and bf16 together", "A product is computed in one type; the trainer raises "
                            "\"At most one of fp16 and bf16 can be True\"", subject.settings["training.fp16"],
                            subject.settings["training.bf16"], expected=Expected("the run starts", "none"),
                            cure=Cure("Keep bf16 where the hardware has it, else fp16", set_to(subject, "training.fp16",
                                                                                               False)))
