"""No clipping of gradients."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import number, products_dtype
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.max_grad_norm"


class ClippingOff(Rule):
    name = "clipping_off"
    rests_on = "features: F25 (clipping is about steadiness and costs hardly any time)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if KEY in subject.settings and number(subject, KEY) == 0:
            yield cls.found("low", "gradients are not clipped", "One odd batch may undo many steps"
                            + (", in fp16 more easily" if products_dtype(subject) == "fp16" else ""), subject.settings[KEY],
                            expected=NO_SPEED, cure=Cure("Clip at a norm of 1",
                                                         set_to(subject, KEY, 1.0), ("max_grad_norm=1.0",)))
