"""Examples longer than max_length, whose ends are cut off."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import number, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.workload import length_at
from powertrain.records import DataFacts
from powertrain.records.findings import Cure, Finding
from powertrain.shapes import QUANTILES

KEY = "training.max_length"
FEW = 0.01                   # of the examples
POINTS = 200


class MaxLengthCuts(Rule):
    name = "max_length_cuts"
    rests_on = "documentation: SFTConfig (max_length is 1024 where it is not set); features: section 5, weakness 9"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        limit, data = number(subject, KEY), where.data
        if limit is None or data is None or data.kind == "blocks" or not set(data.length_quantiles) & set(QUANTILES):
            return
        cut, longest = _cut_share(data, limit), max(data.length_quantiles.get("max", 0), data.max_length)
        if cut >= FEW:
            yield cls.found("moderate", "max_length cuts examples off", f"About {cut:.0%} of the examples have more than "
                            f"{limit:g} tokens (the longest {longest:,}). What is cut is their end: the answer, and the sign "
                            "that it is finished",
                            seen(subject, KEY), expected=NO_SPEED,
                            cure=Cure(f"Raise max_length to {longest:,}, or drop the examples that are longer", (),
                                      (f"data.max_length={longest}",)))


def _cut_share(data: DataFacts, limit: float) -> float:
    """The share of the examples that are longer, on straight lines between the known quantiles."""
    return sum(length_at(data.length_quantiles, (point + 0.5) / POINTS) > limit for point in range(POINTS)) / POINTS
