"""The rules on code: each fires where its cause is, is silent where it is not, and its patch takes the cause away."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import CASES, HEAD

from powertrain.audit.edits import make_patch
from powertrain.audit.reading_script import read_script
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances
from powertrain.records.findings import Finding

BY_NAME = {rule.name: rule for rule in RULES}


def findings(name: str, text: str, folder: Path) -> list[Finding]:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return list(BY_NAME[name].find(read_script(path), Circumstances()))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_fires_once_where_its_cause_is(name: str, tmp_path: Path) -> None:
    found = findings(name, CASES[name][0], tmp_path)
    assert [finding.rule for finding in found] == [name]
    assert all(item.place is None or item.place.line > HEAD.count("\n") - 1 for item in found[0].evidence)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_silent_where_its_cause_is_not(name: str, tmp_path: Path) -> None:
    assert findings(name, CASES[name][1], tmp_path) == []


@pytest.mark.parametrize("name", CASES)
def test_a_patch_takes_its_cause_away(name: str, tmp_path: Path) -> None:
    found = findings(name, CASES[name][0], tmp_path)
    patch = make_patch(found)
    if not found[0].cure.edits:
        return
    assert patch.applied, patch.left_out
    assert findings(name, next(iter(patch.after.values())), tmp_path) == []
