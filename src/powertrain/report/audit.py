"""An audit as text: rows for the terminal, JSON, a Markdown report with a plan in phases, and SARIF.

SARIF 2.1.0 is what code hosts show beside the lines: https://docs.oasis-open.org/sarif/sarif/v2.1.0/
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from powertrain.records import to_plain
from powertrain.records.findings import NO_SPEED, SEVERITIES, UNMEASURED, Audit, Edit, Evidence, Finding, Severity
from powertrain.report.formats import render

PHASES = {"low": "Now: small changes that break nothing", "medium": "Next: changes to test on a short run",
          "high": "Later: changes that need work"}
LONGEST = 110                # characters of evidence; a call over twenty lines is found by its line
HEADINGS = {"critical": "Critical findings", "moderate": "Moderate findings", "low": "Low findings", "good": "Good as it is"}
OPTIONS = {"--verify": "the equivalent recipe beside the original's way, measured",
           "--convert --output recipe.yaml": "that recipe as a file"}
COMMANDS = {"powertrain diagnose recipe.yaml": "what such a run is bound by, from its first steps",
            "powertrain diagnose RUN": "the same of a run that is training, from its events"}
NUMBERED = tuple[int, Finding]
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: Mapping[Severity, str] = {"critical": "error", "moderate": "warning", "low": "note", "good": "none"}


def terminal_rows(audit: Audit, *, verbose: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (severity, text) for each line of the report in a terminal; what is not read is one line unless `verbose`."""
    yield "Audit", f"{audit.subject} ({audit.kind})"
    yield from ((name.capitalize(), value) for name, value in audit.environment.items())
    yield "Found", counted(audit.findings)
    for number, finding in enumerate(audit.findings, 1):
        yield "", ""
        yield finding.severity.upper(), f"{number}. {finding.title} [{finding.rule}]"
        yield from [("", f"Only when {finding.when}")] if finding.when else []
        yield "", finding.why
        yield from (("", f"  {where}") for where in places(finding))
        if finding.severity != "good":
            yield "", f"-> {finding.cure.says}" + (" (patch)" if finding.cure.edits else "")
        if finding.severity != "good" and says_something(finding):
            yield "", f"   expected: {expected(finding)}"
    if audit.undetermined:
        yield "", ""
    if verbose or len(audit.undetermined) < 2:
        yield from (("Not read", line) for line in audit.undetermined)
    else:
        yield "Not read", f"{len(audit.undetermined)} settings and calls known only when the script runs; --verbose lists them"


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


# ------------------------------------------------------------------------------------------------ SARIF


def sarif(audits: Sequence[Audit], version: str, texts: Mapping[str, str], root: Path) -> dict[str, Any]:
    """Return one SARIF run with the findings of all audits. What is good is left out: hosts make an alert of every result.

    `texts`: the audited files, by which the fixes are told where lines end. `root`: what paths are relative to.
    """
    findings = [(audit, finding) for audit in audits for finding in audit.findings if finding.severity != "good"]
    described = {finding.rule: finding for _, finding in findings}
    rules = list(described)
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{
        "tool": {"driver": {"name": "powertrain audit", "version": version,
                            "rules": [_rule(finding) for finding in described.values()]}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": [
            {"level": "note", "message": {"text": line}} for audit in audits for line in audit.undetermined]}],
        "results": [_result(audit, finding, rules.index(finding.rule), texts, root) for audit, finding in findings]}]}


def _rule(finding: Finding) -> dict[str, Any]:
    return {"id": finding.rule, "shortDescription": {"text": finding.title}, "fullDescription": {"text": finding.rests_on},
            "help": {"text": finding.cure.says}, "defaultConfiguration": {"level": LEVELS[finding.severity]}}


def _result(audit: Audit, finding: Finding, index: int, texts: Mapping[str, str], root: Path) -> dict[str, Any]:
    places = [_location(item, root) for item in finding.evidence if item.place is not None]
    whole = {"physicalLocation": {"artifactLocation": {"uri": uri(audit.subject, root)}, "region": {"startLine": 1}}}
    result: dict[str, Any] = {
        "ruleId": finding.rule, "ruleIndex": index, "level": LEVELS[finding.severity], "kind": "fail",
        "message": {"text": ". ".join(filter(None, (finding.title, finding.when and f"Only when {finding.when}", finding.why,
                                                    finding.cure.says)))},
        "locations": places[:1] or [whole],              # more than one means: mend all of them
        "properties": {"severity": finding.severity, "expected": finding.expected.says, "basis": finding.expected.basis}}
    if places[1:]:
        result["relatedLocations"] = [{"id": number, **place} for number, place in enumerate(places[1:], 1)]
    if finding.cure.edits:
        files = dict.fromkeys(edit.file for edit in finding.cure.edits)
        result["fixes"] = [{"description": {"text": finding.cure.says}, "artifactChanges": [
            {"artifactLocation": {"uri": uri(file, root)},
             "replacements": [_replacement(edit, texts.get(file, "")) for edit in finding.cure.edits if edit.file == file]}
            for file in files]}]
    return result


def _location(evidence: Evidence, root: Path) -> dict[str, Any]:
    assert evidence.place is not None
    region: dict[str, Any] = {"startLine": max(1, evidence.place.line)}      # hosts want a line; the first is the file's
    if evidence.place.line:
        region["snippet"] = {"text": evidence.what}
    return {"physicalLocation": {"artifactLocation": {"uri": uri(evidence.place.file, root)}, "region": region},
            "message": {"text": evidence.what}}


def _replacement(edit: Edit, text: str) -> dict[str, Any]:
    """Return an edit of whole lines: up to the next line's start, or to the end of a file whose last line has no line end."""
    lines = text.splitlines()
    last = {"endLine": edit.last + 1, "endColumn": 1}
    if edit.last >= len(lines) and not text.endswith("\n") and edit.last >= edit.first:
        last = {"endLine": edit.last, "endColumn": len(lines[-1]) + 1 if lines else 1}
    return {"deletedRegion": {"startLine": edit.first, "startColumn": 1, **last}, "insertedContent": {"text": edit.text}}


def uri(file: str, root: Path) -> str:
    """Return the file's address: relative to `root` if the file lies under it, as code hosts want it."""
    path = (root / file).resolve()
    return quote(path.relative_to(root).as_posix()) if path.is_relative_to(root) else path.as_uri()
