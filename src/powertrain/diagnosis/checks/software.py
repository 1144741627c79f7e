"""Parts that are not installed, where a technique would have used them."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding


class Software(Check):
    name = "software"
    rests_on = "fact: what is installed"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        missing = where.prepared.facts.software.missing
        for refusal in where.prepared.plan.refused:
            for part, why in missing.items():
                # a technique names the part that it lacks in quotes; one that the machine itself rules out is no loss
                if f"part {part!r}" in refusal.because and not why.startswith("needs a CUDA GPU"):
                    yield cls.says("low", f"{refusal.technique} is left out for want of {part}", refusal.because,
                                   seen=f"{part}: {why}", cure=f"install {part}",
                                   expected=Expected(f"{refusal.technique} is considered again", "none"))
