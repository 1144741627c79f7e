"""An audit as a document: environment, findings by rank, a plan in phases with how to test each, what
could not be told, and a conclusion with the next action."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence

from powertrain.records.findings import NO_SPEED, SEVERITIES, Audit, Edit, Finding
from powertrain.report.audit import PHASES, counted, expected, phase, places, says_something
from powertrain.report.markdown import escaped, prose

HEADINGS = {"critical": "Critical findings", "moderate": "Moderate findings", "low": "Low findings", "good": "Good as it is"}
NUMBERED = tuple[int, Finding]


def write(audit: Audit, texts: Mapping[str, str]) -> str:
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
            yield from _good(number, finding) if severity == "good" else _finding(number, finding, texts)
    wrong = [(number, finding) for number, finding in numbered if finding.severity != "good"]
    if wrong:
        yield from _plan(wrong)
        yield from _tests(audit, wrong)
    yield from ("", "## What could not be determined", "")
    yield from (f"- {escaped(line)}" for line in audit.undetermined) if audit.undetermined else iter(
        ("Every setting that was found could be read.",))
    yield from ("", "## Conclusion", "", *_conclusion(audit, wrong))


def _good(number: int, finding: Finding) -> Iterator[str]:
    yield from ("", f"### GOOD #{number}: {prose(finding.title)}", "", prose(finding.why), "")
    yield from (f"- {code(place)}" for place in places(finding))


def _finding(number: int, finding: Finding, texts: Mapping[str, str]) -> Iterator[str]:
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


# ------------------------------------------------------------------------------------------------ what to do


def _phases(wrong: Sequence[NUMBERED]) -> list[tuple[str, list[NUMBERED]]]:
    """(title, findings) of each phase that has any."""
    found = [(title, [item for item in wrong if phase(item[1]) == degree]) for degree, title in PHASES.items()]
    return [(f"Phase {number}. {title}", here) for number, (title, here) in
            enumerate([item for item in found if item[1]], 1)]


def _plan(wrong: Sequence[NUMBERED]) -> Iterator[str]:
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


# ------------------------------------------------------------------------------------------------ words


def code(text: str) -> str:
    """Text as it is, in a code span that none of its own backticks ends."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if text[:1] == "`" or text[-1:] == "`" else f"{ticks}{text}{ticks}"
