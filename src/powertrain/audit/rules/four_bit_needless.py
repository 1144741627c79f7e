"""4-bit weights where the same weights fit in bf16."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import GIB, room
from powertrain.audit.resolved import is_four_bit, seen
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk


class FourBitNeedless(Rule):
    name = "four_bit_needless"
    rests_on = "technique: four_bit_base; features: X10 (it saves memory and costs speed)"
    gives_way_to = frozenset({"quantised_without_adapters"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        found = room(subject, where, four_bits=False)
        if found is None or not is_four_bit(subject):
            return
        needed, there = found
        if needed <= there:
            yield cls.found("moderate", "4-bit weights where bf16 would fit", f"In bf16 a step needs about {needed / GIB:.1f} "
                            f"GiB, and {there / GIB:.1f} may be counted on here: rounding to 16 values and widening each "
                            "matrix for each product buys nothing", seen(subject, "quantisation.load_in_4bit"),
                            expected=Expected("faster, by how much is not measured here; no rounding of the base", "none"),
                            risk=Risk("low", "none", "low"),
                            cure=Cure("Load the model in bf16 and train adapters on that",
                                      set_to(subject, "quantisation.load_in_4bit", False), ("method=lora",)))
