"""`powertrain audit`: its reports agree, its exit code follows --fail-on, and --apply writes a mended copy."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from powertrain.cli.auditing import audit
from powertrain.records import WrongUse

BAD = """import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for epoch in range(3):
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        torch.cuda.empty_cache()
"""
GOOD = BAD.replace("torch.cuda.empty_cache()", "optimizer.zero_grad()")


def run(path: Path, **options: object) -> int:
    given = {"as_json": False, "sarif": None, "markdown": None, "apply": False, "destination": None, "elsewhere": True,
             "fail_on": "critical"}
    return audit(path, **given | options)          # type: ignore[arg-type]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BAD, encoding="utf-8")
    return path


def test_all_reports_name_the_same_findings(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, as_json=True, sarif=tmp_path / "a.sarif", markdown=tmp_path / "a.md")
    found = json.loads(capsys.readouterr().out)
    rules = [finding["rule"] for finding in found["findings"]]
    assert rules[:2] == ["gradients_not_zeroed", "cache_emptied_in_loop"]
    results = json.loads((tmp_path / "a.sarif").read_text())["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == rules
    assert results[0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 8
    text = (tmp_path / "a.md").read_text()
    assert "### CRITICAL #1: gradients are never set back" in text
    assert "+         optimizer.zero_grad(set_to_none=True)" in text


def test_the_exit_code_follows_what_is_to_fail(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (run(script), run(script, fail_on="never")) == (1, 0)
    script.write_text(GOOD, encoding="utf-8")
    assert run(script, fail_on="moderate") == 0


def test_the_patched_copy_parses_and_has_its_causes_taken_away(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, apply=True)
    copy = script.with_name("train.patched.py")
    ast.parse(copy.read_text())
    assert script.read_text() == BAD
    assert run(copy, fail_on="moderate") == 0
    assert "+        optimizer.zero_grad(set_to_none=True)" in capsys.readouterr().out


def test_what_is_no_script_or_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path / "notes.txt", tmp_path / "absent.py"):
        with pytest.raises(WrongUse):
            run(path)
