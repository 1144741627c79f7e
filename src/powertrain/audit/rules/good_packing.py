"""Examples packed so that they keep to themselves."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import is_on
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Finding


class GoodPacking(Rule):
    name = "good_packing"
    rests_on = "technique: packing; features: F11"
    gives_way_to = frozenset({"packing_leaks"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if "training.packing" in subject.settings and is_on(subject, "training.packing"):
            yield cls.found("good", "packing is on", "No slot is spent on padding, and examples keep to themselves; a step "
                            "has more examples than batch times accumulation say",
                            subject.settings["training.packing"], expected=NO_SPEED, cure="Keep it")
