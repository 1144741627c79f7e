"""What finished runs teach later plans: kept one line a run, read as a spread, never trusted where it is broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from powertrain import planner
from powertrain.cost.estimate import ideal_step_s, kind_of_work, workload_work
from powertrain.recipe import Recipe
from powertrain.records import Facts, Plan
from powertrain.records.event_log import read_events
from powertrain.records.events import Memory
from powertrain.run.learned import keep_speed, read_speeds, speed_line, speeds_file, with_speeds

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def known(facts: Facts) -> Facts:
    """A machine of known speed, which has run nothing yet."""
    return replace(facts, hardware=replace(facts.hardware, peak_flops_per_s={"fp32": 1e11, "bf16": 2e11},
                                           bandwidth_bytes_per_s=1e10, fingerprint="here", speeds={}))


@pytest.fixture
def plan(known: Facts) -> Plan:
    return planner.make_plan(known, Recipe(), 100)


def ideal_of(facts: Facts, plan: Plan) -> float:
    return ideal_step_s(workload_work(facts.model, planner.workload_of(facts, plan)), facts.hardware)


def test_a_run_is_kept_as_quantiles_of_its_steps_without_the_first_ones(known: Facts, plan: Plan) -> None:
    steps = [9.0, 9.0, *(0.1 + place / 1000 for place in range(101))]
    line = speed_line(known, plan, [*([9.0] * 9), *steps[2:]])
    assert line is not None
    assert line["step_s"] == {"p10": pytest.approx(0.112, abs=2e-3), "median": pytest.approx(0.151, abs=2e-3),
                              "p90": pytest.approx(0.19, abs=2e-3)}
    assert line["kind"] == kind_of_work(known.model, planner.workload_of(known, plan))
    assert line["ideal_s"] == ideal_of(known, plan) >= line["floor_s"]


def test_a_run_of_few_steps_or_on_an_unmeasured_machine_says_nothing(known: Facts, plan: Plan, tmp_path: Path) -> None:
    assert speed_line(known, plan, [0.1] * 11) is None
    unmeasured = replace(known, hardware=replace(known.hardware, peak_flops_per_s={}))
    assert speed_line(unmeasured, plan, [0.1] * 50) is None
    assert not keep_speed(tmp_path, unmeasured, plan, [0.1] * 50)
    assert not list(tmp_path.iterdir())


def test_later_plans_expect_what_runs_of_the_same_kind_reached(known: Facts, plan: Plan, tmp_path: Path) -> None:
    ideal_s = ideal_of(known, plan)
    assert keep_speed(tmp_path, known, plan, [4 * ideal_s] * 30)
    assert keep_speed(tmp_path, known, plan, [5 * ideal_s] * 30)
    taught = replace(known, hardware=with_speeds(known.hardware, tmp_path))
    expected = planner.make_plan(taught, Recipe(), 100).estimate
    assert expected is not None
    assert "2 runs on this machine" in expected.basis
    assert expected.step_s[0] <= 4 * ideal_s <= 5 * ideal_s <= expected.step_s[1] <= 6 * ideal_s
    assert with_speeds(replace(known.hardware, fingerprint="elsewhere"), tmp_path).speeds == {}


def test_broken_lines_are_passed_over_and_an_unwritable_cache_loses_the_line(known: Facts, plan: Plan, tmp_path: Path) -> None:
    assert keep_speed(tmp_path, known, plan, [0.5] * 30)
    file = speeds_file(tmp_path, "here")
    whole = file.read_text()
    zero = json.dumps({**json.loads(whole), "step_s": {"p10": 0, "median": 0, "p90": 0}})
    file.write_text("{}\nnot json\n" + whole + zero + "\n" + whole[: len(whole) // 2])
    (found,) = read_speeds(file).values()
    assert found.runs == 1
    (tmp_path / "speeds2").write_text("a file")
    assert not keep_speed(tmp_path / "speeds2", known, plan, [0.5] * 30)
    assert read_speeds(tmp_path / "nowhere") == {}


def test_only_the_newest_runs_of_a_kind_count(known: Facts, plan: Plan, tmp_path: Path) -> None:
    for seconds in (1.0, *[0.5] * 20):
        keep_speed(tmp_path, known, plan, [seconds] * 30)
    (found,) = read_speeds(speeds_file(tmp_path, "here")).values()
    assert found.runs == 20
    assert found.low == found.median == found.high


def test_a_finished_run_leaves_a_line_and_its_memory_beside_what_was_predicted(cli: Cli, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    words = ["train", "data=text.txt", "model.family=gpt2", "model.layers=2", "model.width=32", "model.heads=2",
             "data.tokenizer=char", "data.block=16", "train_batch_size=14", "eval_steps=0", "save_steps=0", "sample.tokens=0",
             "sample.prompt=", "techniques.threads=off", "logging_steps=50"]
    before = sum(len(file.read_text().splitlines()) for file in (cache / "speeds").glob("*.jsonl"))
    code, out, err = cli(*words, "max_steps=24", "--output", "run")
    assert code == 0, err
    assert sum(len(file.read_text().splitlines()) for file in (cache / "speeds").glob("*.jsonl")) == before + 1
    (measured,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Memory)]
    assert measured.step == 2
    assert measured.allocated_bytes == pytest.approx(sum(measured.predicted.values()), rel=0.1)
    assert "of tensors at the peak of step 2; the plan expected" in out
