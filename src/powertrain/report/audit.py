"""An audit as text: rows for the terminal, JSON, and a Markdown report with a plan in phases."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.records import to_plain
from powertrain.records.findings import NO_SPEED, SEVERITIES, UNMEASURED, Audit, Edit, Evidence, Finding
from powertrain.report.markdown import escaped, prose

MARKS = {"critical": "CRITICAL", "moderate": "MODERATE", "low": "LOW", "good": "GOOD"}
PHASES = {"low": "Now: small changes that break nothing", "medium": "Next: changes to test on a short run",
          "high": "Later: changes that need work"}
LONGEST = 110                # characters of evidence; a call over twenty lines is found by its line
HEADINGS = {"critical": "Critical findings", "moderate": "Moderate findings", "low": "Low findings", "good": "Good as it is"}
NUMBERED = tuple[int, Finding]


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
    """Return a finding as JSON, each piece of evidence with its file and line."""
    evidence = [{"what": item.what, "file": item.place.file if item.place else None,
                 "line": item.place.line if item.place else None} for item in finding.evidence]
    return {**to_plain(finding), "evidence": evidence}


# ------------------------------------------------------------------------------------------------ Markdown


def markdown(audit: Audit, texts: Mapping[str, str]) -> str:
    """The audit as Markdown; `texts`: the audited files, of which the fixes are shown as diffs."""
    return "\n".join(_lines(audit, texts)) + "\n"


def _lines(audit: Audit, texts: Mapping[str, str]) -> Iterator[str]:
    numbered = list(enumerate(audit.findings, 1))
    yield from (f"# Training audit of {code(audit.subject)}", "")
    yield f"- **Kind**: {escaped(audit.kind)}"
    yield from (f"- **{escaped(name.capitalize())}**: {escaped(value)}" for name, value in audit.environment.items())
    yield f"- **Found**: {counted(audit.findings)}"
    for severity in SEVERITIES:
        ranked = [(number, finding) for number, finding in numbered if finding.severity == severity]
        if ranked:
            yield from ("", f"## {HEADINGS[severity]}")
        for number, finding in ranked:
            yield from _good(number, finding) if severity == "good" else _finding_lines(number, finding, texts)
    wrong = [(number, finding) for number, finding in numbered if finding.severity != "good"]
    if wrong:
        yield from _phase_plan(wrong)
        yield from _tests(audit, wrong)
    yield from ("", "## What could not be determined", "")
    yield from (f"- {escaped(line)}" for line in audit.undetermined) if audit.undetermined else iter(
        ("Every setting that was found could be read.",))
    yield from ("", "## Conclusion", "", *_conclusion(audit, wrong))


def _good(number: int, finding: Finding) -> Iterator[str]:
    yield from ("", f"### GOOD #{number}: {prose(finding.title)}", "", prose(finding.why), "")
    yield from (f"- {code(place)}" for place in places(finding))


def _finding_lines(number: int, finding: Finding, texts: Mapping[str, str]) -> Iterator[str]:
    yield from ("", f"### {finding.severity.upper()} #{number}: {prose(finding.title)}", "", "**Current status**:", "")
    yield from (f"- {code(place)}" for place in places(finding))
    yield from ("", f"**Why it matters here**: {prose(finding.why)}", "")
    yield from (f"**Expected effect**: {prose(expected(finding))}", "", f"**Risk**: {_risk(finding)}", "")
    yield f"**Fix**: {prose(finding.cure.says)}"
    difference = _difference(finding.cure.edits, texts)
    if difference:
        yield from ("", "```diff", *difference, "```")
    if finding.cure.words:
        yield from ("", f"In a Powertrain recipe: {code(' '.join(finding.cure.words))}")
    yield from ("", f"*Rule {code(finding.rule)}; rests on {prose(finding.rests_on)}*")


def _risk(finding: Finding) -> str:
    risk = finding.risk
    return f"may break: {risk.breaking}; may change accuracy: {risk.accuracy}; difficulty: {risk.difficulty}"


def _difference(edits: tuple[Edit, ...], texts: Mapping[str, str]) -> list[str]:
    """The lines that edits take away and put in."""
    found: list[str] = []
    for edit in sorted(edits, key=lambda edit: (edit.file, edit.first, edit.last)):
        lines = texts.get(edit.file, "").splitlines()
        diff = difflib.ndiff(lines[edit.first - 1:edit.last], edit.text.splitlines())
        found += [f"{line[0]} {line[2:]}" for line in diff if line[0] in "+-"]
    return found


def _phases(wrong: Sequence[NUMBERED]) -> list[tuple[str, list[NUMBERED]]]:
    """(title, findings) of each phase that has any."""
    found = [(title, [item for item in wrong if phase(item[1]) == degree]) for degree, title in PHASES.items()]
    return [(f"Phase {number}. {title}", here) for number, (title, here) in
            enumerate([item for item in found if item[1]], 1)]


def _phase_plan(wrong: Sequence[NUMBERED]) -> Iterator[str]:
    yield from ("", "## Plan")
    for title, here in _phases(wrong):
        yield from ("", f"### {title}", "", "| finding | change | patch | expected |", "|---|---|---|---|")
        for number, finding in here:
            patch = "yes" if finding.cure.edits else "by hand"
            yield (f"| #{number} {code(finding.rule)} | {prose(finding.cure.says)} | {patch} | "
                   f"{prose(expected(finding)) if says_something(finding) else ''} |")
    yield from ("", *_together(wrong))


def _together(wrong: Sequence[NUMBERED]) -> Iterator[str]:
    """Bounds are not multiplied: two cures may save the same seconds."""
    fast = [(finding.expected.speed, number) for number, finding in wrong if finding.expected.speed is not None]
    if not fast:
        yield "**Together**: no single finding has a figure for its speed, so there is none for all of them."
        return
    (low, high), number = max(fast, key=lambda item: item[0][1])
    yield (f"**Together**: the largest single effect is {low:.2f} to {high:.2f} times as fast (#{number}). Effects are not "
           "multiplied, as several may save the same time.")


def _tests(audit: Audit, wrong: Sequence[NUMBERED]) -> Iterator[str]:
    """How to see, phase by phase, that the changes do what they should."""
    patched = any(finding.cure.edits for _, finding in wrong)
    yield from ("", "## Testing", "", "For each phase: run some 20 steps before and after, with the same seed and data, and "
                "compare the time of a step, the first few left out.")
    if patched:
        yield from ("", f"`powertrain audit {audit.subject} --apply` writes a patched copy and leaves the original as it is.")
    for title, here in _phases(wrong):
        quiet = [number for number, finding in here if finding.expected != NO_SPEED and finding.risk.accuracy == "none"]
        loud = [number for number, _ in here if number not in quiet]
        yield from ("", f"**{title.partition(':')[0]}**", "")
        if quiet:
            yield f"- {_listed(quiet)}: the loss of each step has to stay what it was, up to rounding."
        if loud:
            yield f"- {_listed(loud)}: the loss changes with what is learned; compare it on held-out data at the end of a run."
    yield from ("", "**Monitoring**", "", "```text", *_aligned((
        (f"powertrain audit {audit.subject} --verify", "the equivalent recipe beside the original's way, measured"),
        (f"powertrain audit {audit.subject} --convert --output recipe.yaml", "that recipe as a file"),
        ("powertrain diagnose recipe.yaml", "what such a run is bound by, from its first steps"),
        ("powertrain diagnose RUN", "the same of a run that is training, from its events"))), "```")


def _aligned(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(command) for command, _ in rows)
    return (f"{command:<{width}}   {says}" for command, says in rows)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"#{number}" for number in numbers)


def _conclusion(audit: Audit, wrong: Sequence[NUMBERED]) -> Iterator[str]:
    yield f"**Current state**: {counted(audit.findings)}."
    if not wrong:
        yield from ("", "**Next action**: none from reading it. What it is bound by only a run tells: "
                        "`powertrain diagnose` on the recipe that `--convert` writes.")
        return
    first_phase = _phases(wrong)[0][1]
    number, finding = wrong[0]
    yield from ("", f"**Worst**: #{number}, {prose(finding.title)}.", "")
    rest = sum(other != number for other, _ in first_phase)
    then = f" Then the rest of phase 1 ({rest} more), tested as above." if rest else ""
    yield f"**Next action**: {prose(finding.cure.says)}.{then}"


def code(text: str) -> str:
    """Text as it is, in a code span that none of its own backticks ends."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if text[:1] == "`" or text[-1:] == "`" else f"{ticks}{text}{ticks}"
