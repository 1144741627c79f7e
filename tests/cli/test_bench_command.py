"""`powertrain bench`: what it prints and keeps, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.cli import proving
from powertrain.evidence import bench as suites
from powertrain.evidence.assertions import Assertion
from powertrain.evidence.studies import load

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def quick(tiny: list[str]) -> list[str]:
    return [*tiny, "train_batch_size=2", "techniques.micro_batch=off"]


def test_it_says_what_the_budget_did_not_reach_and_keeps_a_study(cli: Cli, quick: list[str], tmp_path: Path) -> None:
    code, out, err = cli("bench", *quick, "--budget", "0.001s", "--study", "mine")
    assert code == 0, err
    assert "Left" in out
    assert "precision: fp32" in out
    assert "studies/mine/" in out
    study = load(tmp_path / "studies" / "mine")
    assert study.kind == "bench"
    assert set(study.findings["tables"]) == {"micro-batch", "loader", "precision", "accumulation"}
    assert [word for word in study.findings["recipe"] if "dropout" in word][-1] == "model.dropout=0"    # the recipe has some
    code, _, err = cli("bench", *quick, "--budget", "1s", "--study", "mine")
    assert code == 2
    assert "use another name" in err


def test_as_json_it_prints_tables_assertions_and_the_study(cli: Cli, quick: list[str]) -> None:
    code, out, err = cli("bench", *quick, "--budget", "0.001s", "--json")
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [event["table"] for event in found if event["event"] == "table"] == [
        "micro-batch", "loader", "precision", "accumulation"]
    assert found[-1]["event"] == "study"
    assert any("dropout is off" in note for note in found[-1]["notes"])


@pytest.mark.parametrize(("word", "says"), [
    ("--budget=soon", "is not a time"), ("learnin_rate=1", "did you mean learning_rate?")])
def test_wrong_use_is_one_sentence(cli: Cli, quick: list[str], word: str, says: str) -> None:
    code, _, err = cli("bench", *quick, word)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_an_assertion_that_does_not_hold_fails_the_command(
        quick: list[str], cache: Path, tmp_path: Path, holds: bool, code: int, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is put in place of measuring."""
    found = Assertion("loader: it does not change the losses", holds, "2 workers: 3 and 4")
    monkeypatch.setattr(suites, "bench", lambda suite, notebook: suite.assertions.append(found))
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    assert proving.bench(quick, budget="1s", study=None, as_json=False) == code
    line = next(line for line in capsys.readouterr().out.splitlines() if "it does not change" in line)
    assert line.startswith("holds" if holds else "FAILS")
