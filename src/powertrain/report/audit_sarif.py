"""An audit as SARIF 2.1.0, which code hosts show beside the lines: https://docs.oasis-open.org/sarif/sarif/v2.1.0/

What is good is left out: hosts make an alert of every result, whatever its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from powertrain.records.findings import Audit, Edit, Evidence, Finding, Severity

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS: Mapping[Severity, str] = {"critical": "error", "moderate": "warning", "low": "note", "good": "none"}


def write(audits: Sequence[Audit], version: str, texts: Mapping[str, str], root: Path) -> dict[str, Any]:
    """Return one SARIF run with the findings of all audits.

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
        "message": {"text": f"{finding.title}. {finding.why}. {finding.cure.says}"},
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
