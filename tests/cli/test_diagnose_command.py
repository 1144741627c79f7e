"""`powertrain diagnose` as a user types it: checks, a real probe, exit codes, and one sentence for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., tuple[int, str, str]]
EXIT = {"good": 0, "low": 0, "moderate": 4, "critical": 5}


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_probe_gives_verdict_forecast_and_checks_and_keeps_nothing(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    code, out, err = cli("diagnose", *tiny, "--budget", "1s", "--price-per-hour", "3")
    assert code in (0, 4, 5), err
    for word in ("Machine", "Verdict", "this run is bound by", "Seen", "Cure", "Gain", "Time", "Cost", "Checks"):
        assert word in out
    assert "watching the first steps of the run" in err
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", ".stdout", ".stderr"}


def test_as_json_there_is_one_object_a_line_and_the_last_has_the_exit_code(cli: Cli, tiny: list[str]) -> None:
    code, out, _ = cli("diagnose", *tiny, "--budget", "1s", "--json")
    found = objects(out)
    kinds = [one["event"] for one in found]
    assert list(dict.fromkeys(kinds)) == ["environment", "finding", "cause", "forecast", "diagnosis"]
    last = found[-1]
    assert (last["exit_code"], EXIT[last["severity"]], last["failed"]) == (code, code, None)
    assert last["bound_by"] == next(one for one in found if one["event"] == "cause")["name"]
    assert last["observed"]["step_s"]


def test_without_a_probe_only_checks_are_there(cli: Cli, tiny: list[str]) -> None:
    code, out, err = cli("diagnose", *tiny, "--no-probe", "--json")
    found = objects(out)
    assert {one["event"] for one in found} == {"environment", "finding", "diagnosis"}
    assert (found[-1]["bound_by"], found[-1]["exit_code"]) == (None, code)
    assert "watching" not in err


def test_a_recipe_that_teaches_nothing_is_critical(cli: Cli, tiny: list[str]) -> None:
    code, out, _ = cli("diagnose", *tiny, "warmup_steps=100", "--no-probe")
    assert code == 5
    assert "critical" in out


def test_a_pin_that_cannot_be_is_found_and_the_rest_is_looked_at_all_the_same(cli: Cli, tiny: list[str]) -> None:
    code, out, _ = cli("diagnose", *tiny, "techniques.tf32=on", "--no-probe", "--json")
    found = objects(out)
    assert code == 5
    assert "pins" in {one["rule"] for one in found if one.get("severity") == "critical" and one["event"] == "finding"}
    assert len([one for one in found if one["event"] == "finding"]) > 1


def test_a_run_that_cannot_be_probed_says_why_and_still_has_its_checks(cli: Cli, tiny: list[str]) -> None:
    wild = [word for word in tiny if not word.startswith("learning_rate")]
    code, out, _ = cli("diagnose", *wild, "learning_rate=1e30", "max_grad_norm=0", "warmup_steps=0", "--budget", "1s", "--json")
    found = objects(out)
    assert code == 5
    assert "not finite" in found[-1]["failed"]
    assert "finding" in {one["event"] for one in found}


@pytest.mark.parametrize(("words", "says"), [
    (["nosuchrecipe"], "nosuchrecipe"), (["learning_rat=1"], "learning_rate"), (["--budget", "soon"], "soon"),
    (["--price-per-hour", "-1"], "is below 0"), (["--machine", "x100"], "known kinds are b200"),
    (["--machine", "h100", "--price-per-hour", "1"], "only its checks are made")])
def test_what_cannot_be_read_is_one_sentence_and_exit_code_2(cli: Cli, words: list[str], says: str) -> None:
    code, out, err = cli("diagnose", *words, "--no-probe")
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not out


def test_the_checks_are_made_for_a_machine_that_is_not_here(cli: Cli, tiny: list[str]) -> None:
    code, out, err = cli("diagnose", *tiny, "--machine", "2x8xh100", "train_batch_size=32", "--json")
    assert code in (0, 4, 5), err
    found = objects(out)
    assert {one["event"] for one in found} == {"environment", "finding", "diagnosis"}, "no step is run"
    assert found[0]["machine"] == "NVIDIA H100 80GB HBM3 (cuda) for each of 16 processes"
    assert "990 TFLOP/s" in found[0]["published"]
    assert {"measured", "software"}.isdisjoint(found[0])
    rules = {one["rule"]: one for one in found if one["event"] == "finding"}
    assert not {"accelerator", "busy", "battery", "threads", "disk", "output_folder", "software"} & set(rules)
    assert rules["run_length"]["evidence"][0]["what"].endswith("s by the plan's estimate from published peaks")
    code, out, err = cli("diagnose", *tiny, "--machine", "h100", "--probe")
    assert (code, out) == (2, "")
    assert "leave --probe" in err
