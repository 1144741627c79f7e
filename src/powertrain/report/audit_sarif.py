"""An audit as SARIF 2.1.0, which code hosts show beside the lines: https://docs.oasis-open.org/sarif/sarif/v2.1.0/"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from powertrain.records.findings import Audit, Edit, Finding, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: Mapping[Severity, str] = {"critical": "error", "moderate": "warning", "low": "note", "good": "none"}


def write(audits: Sequence[Audit], version: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """One run of one tool with the findings of all audits; what is good is a result that passed.

    `texts`: the audited files, by which the fixes are told where lines end.
    """
    findings = [(audit, finding) for audit in audits for finding in audit.findings]
    rules = list(dict.fromkeys(finding.rule for _, finding in findings))
    described = {finding.rule: finding for _, finding in findings}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{
        "tool": {"driver": {"name": "powertrain audit", "version": version,
                            "rules": [_rule(described[name]) for name in rules]}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": [
            {"level": "note", "message": {"text": line}} for audit in audits for line in audit.undetermined]}],
        "results": [_result(audit, finding, rules.index(finding.rule), texts) for audit, finding in findings]}]}


def _rule(finding: Finding) -> dict[str, Any]:
    return {"id": finding.rule, "shortDescription": {"text": finding.title}, "fullDescription": {"text": finding.rests_on},
            "help": {"text": finding.cure.says}, "defaultConfiguration": {"level": LEVELS[finding.severity]}}


def _result(audit: Audit, finding: Finding, index: int, texts: Mapping[str, str]) -> dict[str, Any]:
    places = [item for item in finding.evidence if item.place is not None]
    result: dict[str, Any] = {
        "ruleId": finding.rule, "ruleIndex": index, "level": LEVELS[finding.severity],
        "kind": "pass" if finding.severity == "good" else "fail",
        "message": {"text": f"{finding.title}. {finding.why}. {finding.cure.says}"},
        "locations": [_location(item.place.file, item.place.line, item.what) for item in places if item.place is not None]
        or [_location(audit.subject, 0, finding.title)],
        "properties": {"severity": finding.severity, "expected": finding.expected.says, "basis": finding.expected.basis}}
    if finding.cure.edits:
        files = dict.fromkeys(edit.file for edit in finding.cure.edits)
        result["fixes"] = [{"description": {"text": finding.cure.says}, "artifactChanges": [
            {"artifactLocation": {"uri": uri(file)},
             "replacements": [_replacement(edit, texts.get(file, "")) for edit in finding.cure.edits if edit.file == file]}
            for file in files]}]
    return result


def _location(file: str, line: int, words: str) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": uri(file)}}
    if line:
        place["region"] = {"startLine": line, "snippet": {"text": words}}
    return {"physicalLocation": place}


def _replacement(edit: Edit, text: str) -> dict[str, Any]:
    """Whole lines: from the first column to the first of the line after, or to the end of a last line that has no end."""
    lines = text.splitlines()
    last = {"endLine": edit.last + 1, "endColumn": 1}
    if edit.last >= len(lines) and not text.endswith("\n") and edit.last >= edit.first:
        last = {"endLine": edit.last, "endColumn": len(lines[-1]) + 1 if lines else 1}
    return {"deletedRegion": {"startLine": edit.first, "startColumn": 1, **last}, "insertedContent": {"text": edit.text}}


def uri(file: str) -> str:
    """A relative path stays relative, as code hosts want it."""
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())
