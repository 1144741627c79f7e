"""What every audit rule is: one cause, one file, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from powertrain.diagnosis.audit.subject import Subject
from powertrain.records import Facts
from powertrain.records.findings import Finding


@dataclass(frozen=True)
class Circumstances:
    """Where the subject would run: this machine and, where its files are here, its data and model."""

    facts: Facts | None = None               # None: only the file is looked at


class Rule:
    """One cause of slow, wrong or fragile training. A subclass is a file in this folder and a line in RULES."""

    name: ClassVar[str]                      # the file's name
    rests_on: ClassVar[str]                  # "technique: packing", "fact: ...", "documentation: ...", "features: F16"
    gives_way_to: ClassVar[frozenset[str]] = frozenset()     # rules that, having fired, explain this one's cause too

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        """At most one finding per cause; nothing where the subject is fine or it cannot be told."""
        raise NotImplementedError
