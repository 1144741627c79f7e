"""Weight decay that pulls adapters back to doing nothing."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import method, number
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.weight_decay"
LITTLE = 0.01                # a usual habit without much effect


class DecayOfAdapters(Rule):
    name = "decay_of_adapters"
    rests_on = "fact: decay shrinks A and B, and with BA = 0 the model is the one that was there before"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        decay, how = number(subject, KEY), method(subject)
        if KEY in subject.settings and decay is not None and decay > LITTLE and how in ("lora", "qlora"):
            yield cls.found("low", "weight decay on adapters", f"weight_decay={decay:g} pulls A and B to zero: not to smaller "
                            "weights of the model, but back to the model as it was", subject.settings[KEY], expected=NO_SPEED,
                            cure=Cure("Leave it at 0 for adapters", set_to(subject, KEY, 0.0), ("weight_decay=0",)))
