"""An audit as text: rows for the terminal, JSON, and a Markdown report with a plan in phases."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.records import to_plain
from powertrain.records.findings import NO_SPEED, SEVERITIES, UNMEASURED, Audit, Edit, Evidence, Finding
from powertrain.report.markdown import render

MARKS = {"critical": "CRITICAL", "moderate": "MODERATE", "low": "LOW", "good": "GOOD"}
PHASES = {"low": "Now: small changes that break nothing", "medium": "Next: changes to test on a short run",
          "high": "Later: changes that need work"}
LONGEST = 110                # characters of evidence; a call over twenty lines is found by its line
HEADINGS = {"critical": "Critical findings", "moderate": "Moderate findings", "low": "Low findings", "good": "Good as it is"}
OPTIONS = {"--verify": "the equivalent recipe beside the original's way, measured",
           "--convert --output recipe.yaml": "that recipe as a file"}
COMMANDS = {"powertrain diagnose recipe.yaml": "what such a run is bound by, from its first steps",
            "powertrain diagnose RUN": "the same of a run that is training, from its events"}
NUMBERED = tuple[int, Finding]


def terminal_rows(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield (severity, text) for each line of the report in a terminal."""
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
    """Return the number of findings of each severity, as in "2 critical, 1 low, 3 good"."""
    counts = [(sum(finding.severity == severity for finding in findings), severity) for severity in SEVERITIES]
    return ", ".join(f"{count} {severity}" for count, severity in counts if count) or "nothing to change"


def places(finding: Finding) -> Iterator[str]:
    """Yield each piece of evidence with its line; an argument of a call that is evidence too is left out."""
    for number, evidence in enumerate(finding.evidence):
        before = finding.evidence[:number]
        if not any(evidence.place == other.place and evidence.what in other.what for other in before):
            yield f"{evidence.place}: {shortened(evidence)}" if evidence.place is not None else shortened(evidence)


def shortened(evidence: Evidence) -> str:
    text = " ".join(evidence.what.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST - 4]} ..."


def says_something(finding: Finding) -> bool:
    """Return whether the effect of the cure is known."""
    return finding.expected not in (UNMEASURED, NO_SPEED)


def expected(finding: Finding) -> str:
    """Return the expected effect of the cure, with its basis."""
    found = finding.expected
    return found.says if found.basis == "none" else f"{found.says} ({found.basis})"


def phase(finding: Finding) -> str:
    """Return the degree of a change (low, medium, high): the worse of how much may break and how hard the change is."""
    degrees = ("none", "low", "medium", "high")
    worst = max(degrees.index(finding.risk.breaking), degrees.index(finding.risk.difficulty))
    return degrees[max(1, worst)]


def plain(audit: Audit) -> dict[str, Any]:
    """Return an audit as JSON, each piece of evidence with its file and line."""
    found: dict[str, Any] = to_plain(audit)
    for finding in found["findings"]:
        finding["evidence"] = [{"what": item["what"], **(item["place"] or {"file": None, "line": None})}
                               for item in finding["evidence"]]
    return found


# ------------------------------------------------------------------------------------------------ Markdown


def markdown(audit: Audit, texts: Mapping[str, str]) -> str:
    """Return the audit as Markdown. `texts`: the audited files; the fixes are shown as diffs of them."""
    numbered = list(enumerate(audit.findings, 1))
    wrong = [(number, finding) for number, finding in numbered if finding.severity != "good"]
    # bounds are not multiplied: two cures may save the same seconds
    fast = [(number, finding) for number, finding in wrong if finding.expected.speed is not None]
    number, fastest = max(fast, key=lambda item: (item[1].expected.speed or (0.0, 0.0))[1], default=(0, None))
    commands = {f"powertrain audit {audit.subject} {options}": says for options, says in OPTIONS.items()} | COMMANDS
    return render(
        "audit.md.jinja", {"places": places, "expected": expected, "by_loss": _by_loss, "telling": says_something,
                           "difference": lambda edits: _difference(edits, texts)},
        audit=audit, counted=counted(audit.findings), headings=HEADINGS, wrong=wrong, phases=_phases(wrong), fastest=fastest,
        fastest_number=number, commands=commands, width=max(map(len, commands)),
        by_severity={severity: [item for item in numbered if item[1].severity == severity] for severity in SEVERITIES})


def _difference(edits: tuple[Edit, ...], texts: Mapping[str, str]) -> str:
    """Return the lines that edits remove and add."""
    found: list[str] = []
    for edit in sorted(edits, key=lambda edit: (edit.file, edit.first, edit.last)):
        lines = texts.get(edit.file, "").splitlines()
        diff = difflib.ndiff(lines[edit.first - 1:edit.last], edit.text.splitlines())
        found += [f"{line[0]} {line[2:]}" for line in diff if line[0] in "+-"]
    return "\n".join(found)


def _phases(wrong: Sequence[NUMBERED]) -> list[tuple[str, list[NUMBERED]]]:
    """Return (title, findings) of each phase that has findings."""
    found = {title: [item for item in wrong if phase(item[1]) == degree] for degree, title in PHASES.items()}
    here = [(title, some) for title, some in found.items() if some]
    return [(f"Phase {number}. {title}", some) for number, (title, some) in enumerate(here, 1)]


def _by_loss(here: Sequence[NUMBERED]) -> tuple[str, str]:
    """Return the numbers of the findings whose fixes keep every loss, and of the others."""
    keeping = {number: finding.expected != NO_SPEED and finding.risk.accuracy == "none" for number, finding in here}
    return tuple(", ".join(f"#{number}" for number, keeps in keeping.items() if keeps is wanted)  # type: ignore[return-value]
                 for wanted in (True, False))
