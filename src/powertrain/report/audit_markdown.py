"""An audit as document 002 wrote one by hand: findings by rank, a plan in phases, risks, and what could not be told."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from powertrain.records.findings import SEVERITIES, Audit, Edit, Finding
from powertrain.report.audit import PHASES, counted, expected, phase
from powertrain.report.markdown import escaped

HEADINGS = {"critical": "Critical findings", "moderate": "Moderate findings", "low": "Low findings", "good": "Good as it is"}


def write(audit: Audit, texts: Mapping[str, str]) -> str:
    """The audit as Markdown; `texts`: the audited files, of which the fixes are shown as diffs."""
    return "\n".join(_lines(audit, texts)) + "\n"


def _lines(audit: Audit, texts: Mapping[str, str]) -> Iterator[str]:
    yield from (f"# Training audit of {escaped(audit.subject)}", "")
    yield f"**Found**: {counted(audit)}"
    yield f"**Kind**: {escaped(audit.kind)}"
    yield from (f"**{escaped(name.capitalize())}**: {escaped(value)}" for name, value in audit.environment.items())
    number = 0
    for severity in SEVERITIES:
        ranked = [finding for finding in audit.findings if finding.severity == severity]
        if ranked:
            yield from ("", f"## {HEADINGS[severity]}")
        for finding in ranked:
            number += 1
            yield from _finding(number, finding, texts)
    yield from _plan(audit)
    yield from _risks(audit)
    yield from ("", "## What could not be determined", "")
    yield from (f"- {escaped(line)}" for line in audit.undetermined) if audit.undetermined else iter(
        ("Every setting that was found could be read.",))


def _finding(number: int, finding: Finding, texts: Mapping[str, str]) -> Iterator[str]:
    yield from ("", f"### {finding.severity.upper()} #{number}: {escaped(finding.title)}", "", "**Current status**:", "")
    for evidence in finding.evidence:
        where = f"{escaped(str(evidence.place))}: " if evidence.place is not None else ""
        yield f"- {where}{escaped(evidence.what)}"
    yield from ("", f"**Why it matters here**: {escaped(finding.why)}", "")
    if finding.severity != "good":
        yield from (f"**Expected effect**: {escaped(expected(finding))}", "", f"**Fix**: {escaped(finding.cure.says)}")
        difference = _difference(finding.cure.edits, texts)
        if difference:
            yield from ("", "```diff", *difference, "```")
        if finding.cure.words:
            yield from ("", f"In a Powertrain recipe: `{' '.join(finding.cure.words)}`")
        yield ""
    yield f"*Rule {escaped(finding.rule)}; rests on {escaped(finding.rests_on)}*"


def _difference(edits: tuple[Edit, ...], texts: Mapping[str, str]) -> list[str]:
    """The lines that edits take away and put in."""
    found: list[str] = []
    for edit in edits:
        lines = texts.get(edit.file, "").splitlines()
        diff = difflib.ndiff(lines[edit.first - 1:edit.last], edit.text.splitlines())
        found += [f"{line[0]} {line[2:]}" for line in diff if line[0] in "+-"]
    return found


def _plan(audit: Audit) -> Iterator[str]:
    wrong = [finding for finding in audit.findings if finding.severity != "good"]
    yield from ("", "## Plan")
    if not wrong:
        yield from ("", "Nothing to do.")
        return
    number = 0
    for position, (degree, title) in enumerate(PHASES.items(), 1):
        here = [finding for finding in wrong if phase(finding) == degree]
        yield from ("", f"### Phase {position}. {title}", "") if here else ()
        for finding in here:
            number += 1
            yield f"{number}. {escaped(finding.cure.says)} *({escaped(finding.rule)})*. Expected: {escaped(expected(finding))}"
    yield from ("", "## Total", "", *_total(wrong))


def _total(wrong: list[Finding]) -> Iterator[str]:
    """Bounds are not multiplied: two cures may save the same seconds."""
    fast = [(finding.expected.speed, finding) for finding in wrong if finding.expected.speed is not None]
    if not fast:
        yield "No single finding has a figure for its speed, so there is none for all of them."
        return
    (low, high), finding = max(fast, key=lambda item: item[0][1])
    yield (f"The largest single effect is {low:.2f} to {high:.2f} times as fast ({escaped(finding.rule)}). Effects are not "
           "multiplied: several may save the same time. `powertrain audit PATH --verify` measures all of them together.")


def _risks(audit: Audit) -> Iterator[str]:
    wrong = [finding for finding in audit.findings if finding.severity != "good"]
    if wrong:
        yield from ("", "## Risks", "", "| change | may break | may change accuracy | difficulty |", "|---|---|---|---|")
        yield from (f"| {escaped(finding.rule)} | {risk.breaking} | {risk.accuracy} | {risk.difficulty} |"
                    for finding in wrong for risk in (finding.risk,))
