"""How an audit rule says what it found."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.subject import Setting
from powertrain.records.findings import NO_SPEED, Cure, Degree, Edit, Evidence, Expected, Finding, Risk, Severity, finding

Findings = Iterator[Finding]
STARTS = Expected("the run starts", "none")              # of cures for what ends a run before its first step
UNCHANGED = Expected("nothing changes", "none")          # of cures for settings that do nothing


def found(severity: Severity, title: str, why: str, *seen: Setting | Evidence | None, cure: str, edits: tuple[Edit, ...] = (),
          words: tuple[str, ...] = (), expected: Expected = NO_SPEED, breaking: Degree = "none", accuracy: Degree = "none",
          difficulty: Degree = "low") -> Finding:
    """Return a finding with its cure: a sentence, edits of the file where they are safe, and words of a recipe."""
    return finding(severity, title, why, *seen, cure=Cure(cure, edits, words), expected=expected,
                   risk=Risk(breaking, accuracy, difficulty))
