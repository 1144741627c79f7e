"""The rules on whole programs and launches: each fires where its cause is, and is silent in a near miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_cases import PROGRAM_CASES

from powertrain.audit.reading_script import read_script
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances

BY_NAME = {rule.name: rule for rule in RULES}


def found(name: str, text: str, folder: Path) -> list[str]:
    """Return the rule's name for each finding, of both ways to start the script."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    subject = read_script(path)
    subjects = [subject] if subject.other is None else [subject, subject.other]
    return [finding.rule for each in subjects for finding in BY_NAME[name].find(each, Circumstances())]


@pytest.mark.parametrize("name", PROGRAM_CASES)
def test_a_rule_fires_where_its_cause_is(name: str, tmp_path: Path) -> None:
    assert set(found(name, PROGRAM_CASES[name][0], tmp_path)) == {name}


@pytest.mark.parametrize("name", PROGRAM_CASES)
def test_a_rule_is_silent_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert found(name, PROGRAM_CASES[name][1], tmp_path) == []
