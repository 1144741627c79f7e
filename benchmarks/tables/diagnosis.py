"""docs/diagnosis.md: what is checked, and how crippled recipes fared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.diagnosis.checks import CHECKS
from powertrain.diagnosis.symptoms import SYMPTOMS
from powertrain.records.findings import Rule
from tables.stored import folder_of, machine, markdown_table, studies_of

NONE = ("No study of diagnosis is stored in `studies/` yet: `powertrain diagnose` is put to the proof by "
        "`python benchmarks/crippled.py --study NAME`.\n")
LOOKED_AT = ("name", "finds", "rests on")
CASES = ("crippled by", "named first", "share of the time", "predicted", "measured", "the cure")


def checks(studies: Path) -> str:
    del studies
    return markdown_table(LOOKED_AT, [_looked_at(check) for check in CHECKS])


def symptoms(studies: Path) -> str:
    del studies
    return markdown_table(LOOKED_AT, [_looked_at(symptom) for symptom in SYMPTOMS])


def _looked_at(one: Rule[Any]) -> tuple[str, ...]:
    return f"`{one.name}`", one.about.rstrip("."), one.rests_on


def crippled(studies: Path) -> str:
    """The newest study of crippled recipes, every case of it."""
    found = studies_of("diagnosis", studies)
    if not found:
        return NONE
    study = found[-1]
    cases: Sequence[Mapping[str, Any]] = study["findings"]["cases"]
    held = sum(case["holds"] for case in cases)
    return (f"{held} of {len(cases)} hold: the planted cause was named first, and its cure gave at least half of the predicted "
            f"gain ({machine(study)}; {folder_of(study)}).\n\n"
            f"{markdown_table(CASES, [_case(case) for case in cases])}")


def _case(case: Mapping[str, Any]) -> tuple[str, ...]:
    if case.get("named") is None:
        return case["name"], f"nothing: {case['failed']}", "", "", "", ""
    named = case["named"] if case["named"] == case["planted"] else f"{case['named']}, instead of {case['planted']}"
    measured = "not measured" if case["measured"] is None else f"{case['measured']:.2f} times as fast"
    return (case["name"], named, f"{case['share']:.0%}", f"{case['predicted']:.2f} times as fast", measured,
            " ".join(f"`{word}`" for word in case["cure"]))
