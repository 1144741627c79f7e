"""What the audit finds in public scripts and configs, against what a reader wrote down before: the study of docs/audit.md.

    python benchmarks/audit_public.py read STUDY FILES > found.json      audits every file of STUDY/expectations.json
    python benchmarks/audit_public.py keep STUDY found.json judged.json  writes STUDY/evidence.json from both and the judgements

FILES holds each repository as OWNER+NAME, at the commit that the expectations name. A finding is judged by reading the code at
its line: judged.json has, for each file, the numbers of the findings that are wrong with the reason, and for each expectation
the rule that found it. The files themselves are not kept.

Each file is audited as for a machine that is not known, with the releases below installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.audit.audit import audit
from powertrain.audit.subject import Circumstances
from powertrain.evidence import studies
from powertrain.facts.hardware import read_hardware
from powertrain.facts.software import read_software
from powertrain.records import Software, WrongUse
from powertrain.records.evidence import Study

RELEASES = Software({"transformers": "5.23.0", "trl": "1.16.0", "peft": "0.21.2", "torch": "2.13.0"}, {})
JUDGED = ("critical", "moderate")
HALVES = ("development", *(f"held-out-{number}" for number in range(2, 18)))


def file_of(subject: Mapping[str, Any], folder: Path) -> Path:
    return folder / subject["repo"].replace("/", "+") / subject["path"]


def read(study: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield for each file its findings, or the sentence by which it is refused, which is a critical finding of its own."""
    for subject in json.loads((study / "expectations.json").read_text(encoding="utf-8"))["subjects"]:
        path = file_of(subject, folder)
        own = f"{folder / subject['repo'].replace('/', '+')}/"
        try:
            found = [{"rule": one.rule, "severity": one.severity, "when": one.when, "what": one.title,
                      "where": str(one.evidence[0].place).replace(own, "") if one.evidence and one.evidence[0].place else ""}
                     for one in audit(path, Circumstances(software=RELEASES)).findings if one.severity in JUDGED]
        except WrongUse as error:
            said = str(error).replace(own, "")
            found = [{"rule": "unreadable", "severity": "critical", "when": "", "what": said, "where": ""}]
        yield {"repo": subject["repo"], "path": subject["path"], "half": subject["half"], "findings": found}


def counts(subjects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many were expected and found, and how many findings were right, by severity; of names that are gone apart."""
    made: dict[str, Any] = {"files": len(subjects)}
    for severity in JUDGED:
        expected = [one for subject in subjects for one in subject["expected"] if one["severity"] == severity]
        findings = [one for subject in subjects for one in subject["findings"] if one["severity"] == severity]
        of_code = [one for one in expected if one.get("cause") != "version"]
        made[severity] = {"expected": len(expected), "expected_found": sum(bool(one["found"]) for one in expected),
                          "of_code": len(of_code), "of_code_found": sum(bool(one["found"]) for one in of_code),
                          "findings": len(findings), "right": sum(one["right"] for one in findings)}
    return made


def keep(study: Path, found: Path, judged: Path) -> None:
    """Write the study. Raises WrongUse where a judgement is of something else than what was found."""
    expectations = json.loads((study / "expectations.json").read_text(encoding="utf-8"))["subjects"]
    answers = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    says = json.loads(judged.read_text(encoding="utf-8"))
    subjects = []
    for subject, answer in zip(expectations, answers, strict=True):
        name = f"{subject['repo']}/{subject['path']}"
        mine = says.get(name, {})
        wrong, by = mine.get("wrong", {}), mine.get("found", {})
        if set(wrong) - {str(number) for number in range(len(answer["findings"]))}:
            raise WrongUse(f"{judged} judges a finding of {name} that is not there")
        subjects.append({**subject, "findings": [
            {**one, "right": str(number) not in wrong, **({"why": wrong[str(number)]} if str(number) in wrong else {})}
            for number, one in enumerate(answer["findings"])], "expected": [
            {**one, "found": by.get(str(number), "")} for number, one in enumerate(subject["expected"])]})
    with tempfile.TemporaryDirectory() as cache:
        hardware, software = read_hardware(Path(cache), measure=False), read_software()
    halves = {half: counts([subject for subject in subjects if subject["half"] == half]) for half in HALVES}
    kinds = {kind: counts([subject for subject in subjects if subject.get("kind") == kind])
             for kind in dict.fromkeys(subject["kind"] for subject in subjects if "kind" in subject)}      # of the newest half
    answered = [{**{key: subject[key] for key in ("repo", "path", "half", "findings")},
                 "found": {number: one["found"] for number, one in enumerate(subject["expected"]) if one["found"]}}
                for subject in subjects]             # what was expected stands in expectations.json, by number
    made = Study(study.name, "audit", f"the audit of {len(subjects)} public files, against what a reader expected",
                 **studies.circumstances(hardware, software), findings={"halves": halves, "kinds": kinds, "subjects": answered})
    studies.save(study, made, {"hardware": hardware, "software": software}, over=True)


def main(words: Sequence[str]) -> None:
    if words[:1] == ["read"]:
        for answer in read(Path(words[1]), Path(words[2])):
            print(json.dumps(answer, ensure_ascii=False), flush=True)
    else:
        keep(*map(Path, words[1:4]))


if __name__ == "__main__":
    main(sys.argv[1:])
