"""What every audit rule is: one cause, one file, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from powertrain.audit.subject import Setting, Subject
from powertrain.records import DataFacts, Facts, Hardware, ModelFacts, Software, findings
from powertrain.records.findings import Cure, Evidence, Expected, Finding, Risk, Severity

UNMEASURED, NO_SPEED = findings.UNMEASURED, findings.NO_SPEED          # what most rules expect


@dataclass(frozen=True)
class Circumstances:
    """Where the subject would run: this machine and, where its files are here, its data and model."""

    facts: Facts | None = None               # None: its data and model are not known
    machine: Hardware | None = None          # where only that is known
    installed: Software | None = None
    not_looked_at: str = ""                  # why its data and model are not known

    @property
    def hardware(self) -> Hardware | None:
        return self.facts.hardware if self.facts else self.machine

    @property
    def software(self) -> Software | None:
        return self.facts.software if self.facts else self.installed

    @property
    def model(self) -> ModelFacts | None:
        return self.facts.model if self.facts else None

    @property
    def data(self) -> DataFacts | None:
        return self.facts.data if self.facts else None

    def version(self, part: str) -> tuple[int, ...] | None:
        """Of an installed part, as numbers; None where it is not known or not installed."""
        text = self.software.versions.get(part) if self.software else None
        numbers = (text or "").split("+")[0].split(".")
        return tuple(int(number) for number in numbers if number.isdigit()) or None


class Rule:
    """One cause of slow, wrong or fragile training. A subclass is a file in this folder and a line in RULES."""

    name: ClassVar[str]                      # the file's name
    rests_on: ClassVar[str]                  # "technique: packing", "fact: ...", "documentation: ...", "features: F16"
    gives_way_to: ClassVar[frozenset[str]] = frozenset()     # rules that, having fired, explain this one's cause too

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        """At most one finding per cause; nothing where the subject is fine or it cannot be told."""
        raise NotImplementedError

    @classmethod
    def found(cls, severity: Severity, title: str, why: str, *seen: Evidence | Setting | None, cure: Cure | str,
              expected: Expected = UNMEASURED, risk: Risk = Risk()) -> Finding:  # noqa: B008 - frozen
        """A finding of this rule; `seen` may be settings, and None where one is not set."""
        evidence = tuple(item.evidence if isinstance(item, Setting) else item for item in seen if item is not None)
        return Finding(cls.name, severity, title, why, cls.rests_on, evidence, expected,
                       Cure(cure) if isinstance(cure, str) else cure, risk)
