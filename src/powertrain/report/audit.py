"""An audit for the terminal: what was found, the worst first, each with its evidence and its cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from powertrain.records.findings import SEVERITIES, Audit, Finding

MARKS = {"critical": "CRITICAL", "moderate": "MODERATE", "low": "LOW", "good": "GOOD"}
PHASES = {"low": "Now: small changes that break nothing", "medium": "Next: changes to test on a short run",
          "high": "Later: changes that need work"}


def terminal_rows(audit: Audit) -> Iterator[tuple[str, str]]:
    """(severity, text) for each line of a terminal's report."""
    yield "Audit", f"{audit.subject} ({audit.kind})"
    yield from audit.environment.items()
    yield "Found", counted(audit)
    for number, finding in enumerate(audit.findings, 1):
        yield MARKS[finding.severity], f"{number}. {finding.title} [{finding.rule}]"
        yield "", finding.why
        for evidence in finding.evidence:
            yield "", f"  {evidence.place}: {evidence.what}" if evidence.place is not None else f"  {evidence.what}"
        if finding.severity != "good":
            yield "", f"-> {finding.cure.says}" + (" (patch)" if finding.cure.edits else "")
            yield "", f"   expected: {expected(finding)}"
    for line in audit.undetermined:
        yield "Not read", line


def counted(audit: Audit) -> str:
    """"2 critical, 1 low, 3 good"."""
    counts = [(sum(finding.severity == severity for finding in audit.findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count} {severity}" for count, severity in counts if count) or "nothing"


def expected(finding: Finding) -> str:
    """What curing it gives, and on what that rests."""
    found = finding.expected
    return found.says if found.basis == "none" else f"{found.says} ({found.basis})"


def phase(finding: Finding) -> str:
    """When to do it: a change that may break something, or is hard, comes after those that are neither."""
    degrees = ("none", "low", "medium", "high")
    worst = max(degrees.index(finding.risk.breaking), degrees.index(finding.risk.difficulty))
    return degrees[max(1, worst)]


def plain(audit: Audit) -> dict[str, Any]:
    """An audit as JSON takes it."""
    return {"subject": audit.subject, "kind": audit.kind, "environment": dict(audit.environment),
            "findings": [_plain(finding) for finding in audit.findings], "undetermined": list(audit.undetermined),
            "detail": dict(audit.detail)}


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule, "severity": finding.severity, "title": finding.title, "why": finding.why,
        "rests_on": finding.rests_on,
        "evidence": [{"what": item.what, "file": item.place.file if item.place else None,
                      "line": item.place.line if item.place else None} for item in finding.evidence],
        "expected": {"says": finding.expected.says, "basis": finding.expected.basis,
                     "speed": list(finding.expected.speed) if finding.expected.speed else None},
        "risk": {"breaking": finding.risk.breaking, "accuracy": finding.risk.accuracy, "difficulty": finding.risk.difficulty},
        "cure": {"says": finding.cure.says, "words": list(finding.cure.words),
                 "edits": [{"file": edit.file, "first": edit.first, "last": edit.last, "text": edit.text}
                           for edit in finding.cure.edits]}}
