"""What every check is: one question about machine, software, data or recipe, in one file, and what its answer rests on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Cure, Evidence, Expected, Finding, Risk, Severity

UNMEASURED = Expected("not a matter of speed, or not measured here", "none")


class Check:
    """A subclass is a file in this folder and a line in CHECKS."""

    name: ClassVar[str]                      # the file's name
    rests_on: ClassVar[str]                  # "technique: packing", "fact: ...", "documentation: ...", "features: X11"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        """At most one finding per cause; what is well may be said too, as "good"."""
        raise NotImplementedError

    @classmethod
    def says(cls, severity: Severity, title: str, why: str, *, seen: str, cure: str = "nothing to do",
             words: tuple[str, ...] = (), expected: Expected = UNMEASURED, risk: Risk | None = None) -> Finding:
        """`seen`: the evidence. `words`: of a recipe, that are the cure."""
        return Finding(cls.name, severity, title, why, cls.rests_on, (Evidence(seen),), expected, Cure(cure, words=words),
                       risk or Risk())
