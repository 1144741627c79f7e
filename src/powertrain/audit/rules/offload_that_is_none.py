"""Gradient accumulation "with CPU offload"."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import TRAINERS
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEY = "gradient_accumulation_kwargs"


class OffloadThatIsNone(Rule):
    name = "offload_that_is_none"
    rests_on = "features: F1 (no trainer has such an argument; accelerator_config has one that offloads nothing)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        everything = {**subject.settings, **subject.unread, **subject.unknown}
        asked = next((setting for key, setting in everything.items()
                      if KEY in key.split(".") and "accelerator_config" not in key), None)
        if asked is not None:
            raises = subject.framework in TRAINERS
            yield cls.found("critical" if raises else "moderate", "an offload that does not exist",
                            f"No trainer has {KEY}: " + ("TrainingArguments raises a TypeError" if raises else "nothing "
                                          "reads it, and nothing is offloaded"), asked,
                            expected=Expected("none: nothing was offloaded", "none"),
                            cure=Cure("Take it out; if memory is short, take smaller passes, or activation checkpointing", (),
                                      ("techniques.activation_checkpointing=on",)))
