"""Padding-free batches with a max_length that nothing enforces."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import is_on, is_unread, seen, value
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding


class PaddingFreeUnbounded(Rule):
    name = "padding_free_unbounded"
    rests_on = "documentation: SFTTrainer (TRL 1.16)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework == "trl" and subject.on("training.padding_free") and not is_on(subject, "training.packing") \
                and value(subject, "training.max_length") is not None and not is_unread(subject, "training.packing"):
            yield cls.found("critical", "padding_free without packing", "TRL raises \"When padding_free=True without "
                            "packing, max_length is not enforced\"", subject.settings["training.padding_free"],
                            seen(subject, "training.max_length"), expected=Expected("the run starts", "none"),
                            cure=Cure("Set packing=True, which is padding-free by itself",
                                      set_to(subject, "training.packing", True), ("techniques.packing=on",)))
