"""`powertrain diagnose RUN` on real runs: one that blew up, one that was killed and gone on with, one that is fine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from driver import run_cli
from powertrain.diagnosis.diagnose import causes_of
from powertrain.diagnosis.run_record import RunRecord, read_run
from powertrain.diagnosis.symptoms import symptoms_of

Cli = Callable[..., tuple[int, str, str]]
# enough text that a tiny model does not learn it by heart
CALM = ["model.layers=1", "model.width=32", "model.heads=2", "data.tokenizer=char", "data.block=32", "train_batch_size=16",
        "max_steps=90", "learning_rate=3e-3", "eval_steps=30", "save_steps=0", "logging_steps=30", "sample.prompt=",
        "sample.tokens=0", "techniques.threads=off"]
WILD = [*(word for word in CALM if not word.startswith("learning_rate")), "learning_rate=3", "max_grad_norm=0"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i * i % 97} says {i % 3} and {i * 7 % 11}\n" for i in range(3000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def calm(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(text, cache, tmp_path_factory.mktemp("calm"), CALM)


@pytest.fixture(scope="module")
def wild(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(text, cache, tmp_path_factory.mktemp("wild"), WILD)


def trained(text: Path, cache: Path, folder: Path, words: list[str]) -> Path:
    _, _, err = run_cli(["train", f"data={text}", *words, "--output", "run"], cache, folder)
    assert (folder / "run" / "events.jsonl").exists(), err
    return folder / "run"


def of_learning(run: RunRecord) -> dict[str, str]:
    """Rule -> severity of what does not rest on this machine's times, which other tests beside this one may disturb."""
    return {finding.rule: finding.severity for finding in symptoms_of(run)
            if "times" not in finding.rests_on and "cost/estimate.py" not in finding.rests_on}


def test_a_run_that_is_fine_has_nothing_above_low(calm: Path) -> None:
    assert set(of_learning(read_run(calm)).values()) <= {"low", "good"}


def test_a_learning_rate_far_too_large_is_found_and_lowered(cli: Cli, wild: Path) -> None:
    run = read_run(wild)
    worst = symptoms_of(run)[0]
    assert worst.severity == "critical"
    assert worst.rule in ("not_finite", "divergence")
    assert "learning_rate=0.001" in worst.cure.words
    assert len([rule for rule, severity in of_learning(run).items() if severity != "low"]) == 1
    code, out, _ = cli("diagnose", str(wild))
    assert code == 5
    assert worst.title in out


def test_a_run_that_was_killed_and_gone_on_with_has_lost_work(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    assert cli("train", *tiny, "--output", "run", fault=("step", 7))[0] == -9
    killed = read_run(tmp_path / "run")
    assert (killed.state, of_learning(killed)) == ("killed", {"ended_early": "moderate"})
    assert cli("train", "--resume", "run")[0] == 0
    found = of_learning(read_run(tmp_path / "run"))
    assert "lost_work" in found
    assert "ended_early" not in found


def test_the_verdict_is_made_of_the_runs_own_facts_and_plan(calm: Path) -> None:
    found = causes_of(read_run(calm))
    assert found[0].evidence
    assert any("at the measured" in evidence.what for cause in found for evidence in cause.evidence)


def test_as_json_there_is_one_object_a_line(cli: Cli, calm: Path) -> None:
    _, out, _ = cli("diagnose", str(calm), "--json")
    objects = [json.loads(line) for line in out.splitlines()]
    assert objects[-1]["event"] == "diagnosis"
    assert {one["event"] for one in objects} >= {"environment", "cause", "diagnosis"}


def test_checks_for_another_machine_stand_beside_the_symptoms_of_the_run(cli: Cli, calm: Path) -> None:
    _, plain, _ = cli("diagnose", str(calm), "--json")
    _, out, err = cli("diagnose", str(calm), "--machine", "8xh100", "--json")
    before, after = ([json.loads(line) for line in text.splitlines()] for text in (plain, out))
    there = [one for one in after if one.get("title", "").startswith("on NVIDIA H100 80GB HBM3: ")]
    assert {one["rule"] for one in there} >= {"memory", "precision", "run_length"}, err
    assert {one["rule"] for one in there} <= {"memory", "precision", "quantisation", "run_length", "pins", "software"}
    kept = [one for one in after if one not in there]
    assert kept[1:-1] == before[1:-1], "symptoms and causes are those of the run"
    assert kept[0].pop("checked for").startswith("NVIDIA H100 80GB HBM3 (cuda) for each of 8 processes; published bf16 990")
    assert kept[0] == before[0]


@pytest.mark.parametrize(("words", "says"), [
    (["."], "recipe.yaml is missing"), (["run", "max_steps=3"], "is diagnosed without changes")])
def test_what_cannot_be_diagnosed_is_one_sentence(cli: Cli, tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "run").mkdir()
    code, _, err = cli("diagnose", *words)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
