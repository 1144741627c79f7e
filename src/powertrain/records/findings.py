"""What an audit or a diagnosis says: findings with their evidence, effect, risk and cure. Plain values, JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["critical", "moderate", "low", "good"]
Degree = Literal["none", "low", "medium", "high"]
SEVERITIES: tuple[Severity, ...] = ("critical", "moderate", "low", "good")      # the worst first


@dataclass(frozen=True)
class Place:
    """Where something stands: a file, and the line from 1, or 0 for the file as a whole."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Evidence:
    """What was seen, in the words of the file or with the figures of a measurement."""

    what: str                                # "gradient_checkpointing=True", "the step waited 61 % of its time for data"
    place: Place | None = None


@dataclass(frozen=True)
class Expected:
    """What curing it changes, and on what that rests."""

    says: str                                # "at most 1.4 times as fast", "the model learns to stop"
    basis: str                               # "formula: ...", "study: <folder in studies/>", "measured: ..." or "none"
    speed: tuple[float, float] | None = None     # times as fast, low..high; None where it is not about speed or is unknown


# of findings that no figure can be given for, and of those whose cure changes no speed
UNMEASURED = Expected("no figure: it was not measured here, and no formula gives it", "none")
NO_SPEED = Expected("not about speed", "none")


@dataclass(frozen=True)
class Risk:
    """What the cure may cost, as document 002 asks it."""

    breaking: Degree = "none"
    accuracy: Degree = "none"
    difficulty: Degree = "low"


@dataclass(frozen=True)
class Edit:
    """Lines `first`..`last` (from 1, both included) of `file` become `text`; `last` = `first` - 1 inserts before `first`."""

    file: str
    first: int
    last: int
    text: str                                # whole lines, each ended; "" deletes


@dataclass(frozen=True)
class Cure:
    says: str                                # one sentence in the imperative
    edits: tuple[Edit, ...] = ()             # of the subject's own files
    words: tuple[str, ...] = ()              # of a Powertrain recipe: "techniques.packing=on"


@dataclass(frozen=True)
class Finding:
    """One cause, found once."""

    rule: str                                # the rule's or check's name
    severity: Severity
    title: str
    why: str                                 # why it matters here, with the numbers
    rests_on: str                            # "technique: packing", "fact: ...", "documentation: ...", "features: F16"
    evidence: tuple[Evidence, ...]
    expected: Expected
    cure: Cure
    risk: Risk = Risk()


@dataclass(frozen=True)
class Audit:
    """What an audit found in one script or config."""

    subject: str                             # the path
    kind: str                                # "script: trl", "script: pytorch", "config: axolotl", ...
    environment: Mapping[str, str]
    findings: tuple[Finding, ...]            # the worst first
    undetermined: tuple[str, ...] = ()       # what could not be read without running it, and what depends on it
    detail: Mapping[str, Any] = field(default_factory=dict)
