"""What every symptom is: one thing that a run's events show, in one file, with what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from powertrain.diagnosis.run_record import RunRecord
from powertrain.records.findings import Cure, Evidence, Expected, Finding, Risk, Severity

NO_RISK = Risk()
IDLE_LOAD = 0.75             # of a machine when a session began: from there on, something else was at work
OUT_OF_MEMORY = "ran out of memory"          # how a run says that its passes are smaller from here on (run/session.py)
LEAST_STEPS = 20             # of a run: a curve of fewer has no shape that could be judged


class Symptom:
    """A subclass is a file in this folder and a line in SYMPTOMS."""

    name: ClassVar[str]                      # the file's name
    rests_on: ClassVar[str]                  # "fact: ...", "documentation: ...", "features: ..."
    gives_way_to: ClassVar[frozenset[str]] = frozenset()     # symptoms that, being there, have this one's cause too

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        """At most one finding; nothing where the run is fine, or has too few steps to tell."""
        raise NotImplementedError

    @classmethod
    def found(cls, severity: Severity, title: str, why: str, evidence: Iterable[str], cure: Cure, *, expected: str,
              basis: str = "none", risk: Risk = NO_RISK) -> Finding:
        return Finding(cls.name, severity, title, why, cls.rests_on, tuple(Evidence(text) for text in evidence),
                       Expected(expected, basis), cure, risk)


def several(number: int, noun: str) -> str:
    """"1 step", "2 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
