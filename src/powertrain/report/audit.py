"""An audit for the terminal: what was found, the worst first, each with its evidence and its cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from powertrain.records.findings import NO_SPEED, SEVERITIES, UNMEASURED, Audit, Evidence, Finding

MARKS = {"critical": "CRITICAL", "moderate": "MODERATE", "low": "LOW", "good": "GOOD"}
PHASES = {"low": "Now: small changes that break nothing", "medium": "Next: changes to test on a short run",
          "high": "Later: changes that need work"}
LONGEST = 110                # characters of evidence; a call over twenty lines is found by its line


def terminal_rows(audit: Audit) -> Iterator[tuple[str, str]]:
    """(severity, text) for each line of a terminal's report."""
    yield "Audit", f"{audit.subject} ({audit.kind})"
    yield from ((name.capitalize(), value) for name, value in audit.environment.items())
    yield "Found", counted(audit.findings)
    for number, finding in enumerate(audit.findings, 1):
        yield "", ""
        yield MARKS[finding.severity], f"{number}. {finding.title} [{finding.rule}]"
        yield "", finding.why
        yield from (("", f"  {where}") for where in places(finding))
        if finding.severity != "good":
            yield "", f"-> {finding.cure.says}" + (" (patch)" if finding.cure.edits else "")
        if finding.severity != "good" and says_something(finding):
            yield "", f"   expected: {expected(finding)}"
    if audit.undetermined:
        yield "", ""
    yield from (("Not read", line) for line in audit.undetermined)


def counted(findings: tuple[Finding, ...]) -> str:
    """"2 critical, 1 low, 3 good"."""
    counts = [(sum(finding.severity == severity for finding in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count} {severity}" for count, severity in counts if count) or "nothing to change"


def places(finding: Finding) -> Iterator[str]:
    """Each piece of evidence with its line; an argument of a call that is evidence itself adds nothing."""
    for number, evidence in enumerate(finding.evidence):
        before = finding.evidence[:number]
        if not any(evidence.place == other.place and evidence.what in other.what for other in before):
            yield f"{evidence.place}: {shortened(evidence)}" if evidence.place is not None else shortened(evidence)


def shortened(evidence: Evidence) -> str:
    text = " ".join(evidence.what.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST - 4]} ..."


def says_something(finding: Finding) -> bool:
    """Whether anything is known of the cure's effect."""
    return finding.expected not in (UNMEASURED, NO_SPEED)


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
