"""4-bit weights because others do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.reckoning import GIB, room
from powertrain.audit.resolved import is_four_bit, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Finding


class GoodFourBit(Rule):
    name = "good_four_bit"
    rests_on = "technique: four_bit_base; features: X10"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        found = room(subject, where, four_bits=False)
        if found is None or not is_four_bit(subject):
            return
        needed, there = found
        if needed > there:
            yield cls.found("good", "4-bit weights where they are needed", "In bf16 a step would need about "
                            f"{needed / GIB:.1f} GiB, and {there / GIB:.1f} may be counted on",
                            seen(subject, "quantisation.load_in_4bit"), expected=NO_SPEED, cure="Keep it")
