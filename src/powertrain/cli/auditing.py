"""`powertrain audit`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from powertrain import __version__
from powertrain.cli import output
from powertrain.cli.surroundings import cache_folder
from powertrain.diagnosis.audit import patch as patches
from powertrain.diagnosis.audit.audit import audit_subject
from powertrain.diagnosis.audit.reading import files_in, read_subject
from powertrain.diagnosis.audit.rules import Circumstances
from powertrain.records import WrongUse
from powertrain.records.findings import SEVERITIES, Audit
from powertrain.report import audit as report
from powertrain.report import audit_markdown, audit_sarif

FAIL_ON = ("critical", "moderate", "low", "never")
STDOUT = Path("-")


def audit(path: Path, *, as_json: bool, sarif: Path | None, markdown: Path | None, apply: bool, destination: Path | None,
          elsewhere: bool, fail_on: str) -> int:
    """The audit of a file, or of each script and config in a folder; the exit code."""
    if fail_on not in FAIL_ON:
        raise WrongUse(f"--fail-on {fail_on} is not a rank; take one of {', '.join(FAIL_ON)}")
    if destination is not None and not apply:
        raise WrongUse("--output says where the patched copy goes; it needs --apply")
    if as_json and STDOUT in (sarif, markdown):
        raise WrongUse("--json and a report to - both write to stdout; give the report a file")
    audits = _audits(path, _circumstances(elsewhere))
    texts = {file: patches.read(Path(file)) for file in _files(audits)}
    if as_json:
        for found in audits:
            output.print_json({"event": "audit", **report.plain(found)})
    elif STDOUT not in (sarif, markdown):
        for found in audits:
            output.print_rows(report.terminal_rows(found))
    if markdown is not None:
        _write(markdown, "\n".join(audit_markdown.write(found, texts) for found in audits))
    if sarif is not None:
        _write(sarif, json.dumps(audit_sarif.write(audits, __version__, texts), indent=1, ensure_ascii=False) + "\n")
    if apply:
        _apply(audits, destination, as_json=as_json, aside=as_json or STDOUT in (sarif, markdown))
    worst = SEVERITIES.index(fail_on) if fail_on != "never" else -1
    return output.FAILED if any(SEVERITIES.index(finding.severity) <= worst for found in audits
                                for finding in found.findings) else 0


def _audits(path: Path, where: Circumstances) -> list[Audit]:
    """One audit for each file; in a folder, of those that say something about training."""
    if not path.is_dir():
        return [audit_subject(read_subject(path), where)]
    found = []
    for file in files_in(path):
        try:
            subject = read_subject(file)
        except WrongUse:
            continue                                     # a JSON of data, a YAML of something else
        if subject.settings or (subject.script is not None and subject.script.training_loops):
            found.append(audit_subject(subject, where))
    if not found:
        raise WrongUse(f"there is no training script or config in {path}/; name a file to be told what is wrong with it")
    return found


def _circumstances(elsewhere: bool) -> Circumstances:
    if elsewhere:
        return Circumstances()
    from powertrain.facts.hardware import read_hardware
    from powertrain.facts.software import read_software

    return Circumstances(machine=read_hardware(cache_folder(), measure=False), installed=read_software())


def _files(audits: Sequence[Audit]) -> list[str]:
    """The files that the fixes change."""
    return list(dict.fromkeys(edit.file for found in audits for finding in found.findings for edit in finding.cure.edits))


def _write(path: Path, text: str) -> None:
    if path == STDOUT:
        print(text, end="", flush=True)
    else:
        path.write_text(text, encoding="utf-8")


def _apply(audits: Sequence[Audit], destination: Path | None, *, as_json: bool, aside: bool) -> None:
    """Writes the patched copies, and says what was and was not changed; `aside`: stdout is another report's."""
    several = len(audits) > 1
    for found in audits:
        patch = patches.make_patch(found.findings)
        if not patch.applied:
            nothing = f"nothing: no finding of {found.subject} has a fix that can be written"
            output.print_rows([("Patched", nothing)], stderr=True)
            continue
        for file in [file for file, text in patch.after.items() if text != patch.before[file]]:
            target = destination / Path(file).name if several and destination is not None else destination
            only = replace(patch, before={file: patch.before[file]}, after={file: patch.after[file]})
            written = patches.write_copy(only, target or patches.copy_beside(Path(file)))
            if as_json:
                output.print_json({"event": "patched", "file": file, "written": [str(path) for path in written],
                                   "applied": [finding.rule for finding in patch.applied], "diff": str(only),
                                   "left_out": {finding.rule: reason for finding, reason in patch.left_out}})
                continue
            applied = ", ".join(finding.rule for finding in patch.applied)
            left_out = [("Left out", f"{finding.rule}: {reason}") for finding, reason in patch.left_out]
            output.print_rows([("Patched", f"{written[0]}: {applied}"), *left_out], stderr=aside)
            if not aside:
                print(str(only), end="", flush=True)
