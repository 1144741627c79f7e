"""Tuning, with timings that are made up: what is chosen, what is not, and why."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_arena import Steps, SyntheticArena

from driver import TINY
from powertrain import planner
from powertrain.evidence.notebook import Notebook
from powertrain.evidence.profile import CLASSES
from powertrain.evidence.tuning import Tuning, candidates_of, tune, untuned_plan
from powertrain.recipe import resolve_words
from powertrain.records.evidence import NO_EFFECT, Interval
from powertrain.run.learned import keep_tuned, read_tuned
from powertrain.run.prepare import Prepared, prepare
from powertrain.techniques.base import Exactness
from powertrain.techniques.fused_adamw import FusedAdamW

OFF = ["allocator", "bf16", "torch_compile", "fused_blocks"]     # what a machine has or has not


@pytest.fixture
def words(source: Path) -> list[str]:
    """In force on every machine: fused_adamw, attention_kernel. Left to measuring: these, and some that are off."""
    tiny = [word for word in TINY if not word.startswith("techniques.micro_batch")]
    return [f"data={source}", *tiny, *(f"techniques.{name}=off" for name in OFF)]


@pytest.fixture
def prepared(words: list[str], cache: Path) -> Prepared:
    return prepare(resolve_words(words), cache, lambda text: None)


def find(prepared: Prepared, arena: SyntheticArena, *, budget_s: float = 1000.0, said: list[str] | None = None) -> Tuning:
    notebook = Notebook(arena, ("a", "recipe"), ([] if said is None else said).append, budget_s, now=arena.now)
    found = tune(prepared, notebook)
    json.dumps(found.findings, allow_nan=False)
    return found


def why(found: Tuning, name: str) -> str:
    return str(next(row["why"] for row in found.findings["candidates"] if row["name"].startswith(name)))


def kernel(steps: Steps) -> str:
    return str(steps.get("attention_kernel", {}).get("kernel", "math"))


def test_a_technique_that_hurts_is_left_out(prepared: Prepared) -> None:
    for seed in range(5):
        found = find(prepared, SyntheticArena(lambda steps: 1.0 + 0.15 * ("fused_adamw" in steps), noise=0.02, seed=seed))
        assert found.pins == {"fused_adamw": "off"}
        assert found.speed is not None
        assert found.speed.low > 1
        assert "fused_adamw" not in [step.technique.name for step in found.plan.steps]
        assert [row["name"] for row in found.findings["candidates"] if row["kept"]] == ["without fused_adamw"]


def test_a_technique_that_helps_and_is_off_is_turned_on(prepared: Prepared) -> None:
    found = find(prepared, SyntheticArena(lambda steps: 1.0 - 0.1 * ("loader" in steps), noise=0.01))
    assert found.pins["loader"]["workers"] in (1, 2)
    assert list(found.pins) == ["loader"]


def test_noise_alone_never_changes_the_plan(prepared: Prepared) -> None:
    for seed, noise in itertools.product(range(4), (0.01, 0.05)):
        found = find(prepared, SyntheticArena(lambda steps: 1.0, noise=noise, seed=seed))
        assert found.pins == {}, (seed, noise)
        assert found.plan == untuned_plan(prepared)
        assert found.findings["chosen"] == {}
        assert "already the fastest of" in found.because


def test_where_nothing_is_surely_faster_nothing_more_is_measured(prepared: Prepared) -> None:
    found = find(prepared, SyntheticArena(lambda steps: 1.0))
    assert found.findings["total"] is None
    assert "not surely faster: 1.000" in "".join(str(row["why"]) for row in found.findings["candidates"])


def test_the_untuned_plan_against_itself_has_no_effect(prepared: Prepared) -> None:
    arena = SyntheticArena(lambda steps: 1.0, noise=0.005)
    notebook = Notebook(arena, (), lambda text: None, 1000.0, now=arena.now)
    control = tune(prepared, notebook).findings["control"]
    assert notebook.comparisons[control].verdict == NO_EFFECT


def test_what_is_faster_together_is_combined(prepared: Prepared) -> None:
    def step_s(steps: Steps) -> float:
        return 1.0 - 0.1 * ("fused_adamw" not in steps) - 0.2 * (kernel(steps) == "sdpa")

    arena = SyntheticArena(step_s, noise=0.01)
    found = find(prepared, arena)
    assert found.pins == {"attention_kernel": {"kernel": "sdpa"}, "fused_adamw": "off"}
    assert found.speed is not None
    assert found.speed.median == pytest.approx(1 / 0.7, rel=0.03)
    measured = [(kernel(b), "fused_adamw" in b) for a, b in arena.compared if kernel(a) == "sdpa"]
    assert ("sdpa", False) in measured


def test_what_is_not_faster_together_is_not_combined(prepared: Prepared) -> None:
    def step_s(steps: Steps) -> float:
        plain, sdpa = "fused_adamw" not in steps, kernel(steps) == "sdpa"
        return 1.3 if plain and sdpa else 0.8 if sdpa else 0.9 if plain else 1.0

    found = find(prepared, SyntheticArena(step_s, noise=0.01))
    assert found.pins == {"attention_kernel": {"kernel": "sdpa"}}
    assert "combined with the faster changes: 0.6" in why(found, "without fused_adamw")


def test_what_was_lucky_is_found_out_by_fresh_windows(prepared: Prepared) -> None:
    """A plan that was faster in every round and is not in the end: the machine has changed meanwhile."""
    class Moody(SyntheticArena):
        def probe(self, *arguments: Any, **named: Any) -> Any:
            self.probes = getattr(self, "probes", 0) + 1         # the first one comes before the search, the others after it
            return super().probe(*arguments, **named)

    arena = Moody(lambda steps: 1.0 - 0.2 * ("fused_adamw" not in steps and getattr(arena, "probes", 0) < 2), noise=0.01)
    found = find(prepared, arena)
    assert found.pins == {}
    assert "on fresh windows" in found.because


def test_a_plan_that_learns_something_else_is_not_taken(prepared: Prepared) -> None:
    found = find(prepared, SyntheticArena(
        lambda steps: 1.0 - 0.2 * ("fused_adamw" not in steps),
        losses=lambda steps: (3.0, 2.5, 2.2, 2.0) if "fused_adamw" in steps else (3.0, 2.4, 2.2, 2.0)))
    assert found.pins == {}
    assert "does not learn the same" in found.because


def test_what_does_not_run_is_said(prepared: Prepared) -> None:
    found = find(prepared, SyntheticArena(
        lambda steps: 1.0, cannot=lambda steps: "loader: there are no threads" if "loader" in steps else None))
    assert "it does not run: loader: there are no threads" in why(found, "loader")
    assert found.pins == {}


def test_what_acts_on_too_little_is_not_tried(prepared: Prepared) -> None:
    classes = {**dict.fromkeys(CLASSES, 0.165), "optimizer": 0.01}
    arena = SyntheticArena(lambda steps: 1.0, classes=classes)
    found = find(prepared, arena)
    assert "within the margin, so not tried" in why(found, "without fused_adamw")
    assert all("fused_adamw" in b for _, b in arena.compared)


def test_what_the_budget_does_not_reach_is_said(prepared: Prepared) -> None:
    found = find(prepared, SyntheticArena(lambda steps: 1.0, takes_s=100.0), budget_s=600.0)
    assert not found.complete
    unreached = [row for row in found.findings["candidates"] if row["why"] == "not reached within the budget"]
    assert unreached
    assert all(not row["rounds"] for row in unreached)
    reached = find(prepared, SyntheticArena(lambda steps: 1.0))
    assert reached.complete


def test_each_round_takes_twice_the_pairs_and_keeps_the_better_half(prepared: Prepared) -> None:
    speeds = {("fused_adamw", False): 0.8}

    def step_s(steps: Steps) -> float:
        return speeds.get(("fused_adamw", "fused_adamw" in steps), 1.0)

    arena = SyntheticArena(step_s, noise=0.001)
    notebook = Notebook(arena, (), lambda text: None, 1000.0, now=arena.now)
    rows = tune(prepared, notebook).findings["candidates"]
    rounds = [len(row["rounds"]) for row in rows]
    assert min(rounds) == 1
    assert len(next(row for row in rows if row["kept"])["rounds"]) == max(rounds) > 1
    for number in range(1, max(rounds)):
        assert sum(count > number for count in rounds) <= -(-sum(count >= number for count in rounds) // 2)
    pairs = [comparison.pairs for comparison in notebook.comparisons if comparison.b == "without fused_adamw"]
    assert pairs[:2] == [5, 10]


def test_what_takes_long_to_start_is_kept_for_long_runs(words: list[str], cache: Path) -> None:
    prepared = prepare(resolve_words([word for word in words if "torch_compile" not in word and "dropout" not in word]),
                       cache, lambda text: None)
    if planner.ask_anew("torch_compile", prepared.facts, prepared.recipe).possible is None:  # type: ignore[union-attr]
        pytest.skip("torch.compile cannot be tried here")
    found = find(prepared, SyntheticArena(lambda steps: 1.0 - 0.2 * ("torch_compile" in steps),
                                          compile_s=lambda steps: 20.0 * ("torch_compile" in steps)))
    assert found.pins == {"torch_compile": {"mode": "default"}}
    assert found.least_steps == {"torch_compile": 200}
    row = next(row for row in found.findings["candidates"] if row["kept"])
    assert (row["compile_s"], row["break_even_steps"]) == (20.0, 100)
    tuned = found.as_tuned("2026-11-21", "a-study")
    for steps, expected in ((199, False), (200, True)):
        plan = planner.make_plan(prepared.facts, prepared.recipe, steps, tuned)
        assert ("torch_compile" in [step.technique.name for step in plan.steps]) is expected


def test_what_earns_back_too_little_is_not_taken(prepared: Prepared) -> None:
    found = find(prepared, SyntheticArena(lambda steps: 1.0 - 0.01 * ("loader" in steps), noise=0.001,
                                          compile_s=lambda steps: 20.0 * ("loader" in steps)))
    assert found.pins == {}
    assert "its gain is too small to earn that back" in why(found, "loader")


def test_candidates_keep_what_is_trained(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    untuned = untuned_plan(prepared)
    names = {candidate.technique for candidate in candidates_of(prepared, untuned)}
    assert {"fused_adamw", "attention_kernel", "micro_batch", "loader", "activation_checkpointing"} <= names
    assert not names & {*OFF, "threads", "eight_bit_adamw", "four_bit_base"}
    monkeypatch.setattr(FusedAdamW, "exactness", Exactness.LOSSY)
    assert "fused_adamw" not in {candidate.technique for candidate in candidates_of(prepared, untuned)}


def test_every_technique_has_its_turn_before_second_settings(prepared: Prepared) -> None:
    order = [candidate.technique for candidate in candidates_of(prepared, untuned_plan(prepared))]
    assert order[:len(set(order))] == list(dict.fromkeys(order))


def test_candidates_differ_from_the_untuned_plan_and_from_each_other(prepared: Prepared) -> None:
    untuned = untuned_plan(prepared)
    plans = [[step.technique for step in plan.steps]
             for plan in (untuned, *(candidate.plan for candidate in candidates_of(prepared, untuned)))]
    assert all(one != other for one, other in itertools.combinations(plans, 2))


def test_tuning_starts_from_the_untuned_plan(prepared: Prepared, words: list[str], tmp_path: Path) -> None:
    tuned = planner.Tuned({"fused_adamw": "off"}, Interval(1.2, 1.1, 1.3), "2026-11-21", "a-study")
    keep_tuned(tmp_path, prepared.facts, prepared.recipe, tuned)
    assert read_tuned(tmp_path, prepared.facts, prepared.recipe) == tuned
    again = dataclasses.replace(prepared, plan=planner.make_plan(prepared.facts, prepared.recipe, 11, tuned))
    assert "fused_adamw" in [step.technique.name for step in untuned_plan(again).steps]


def test_the_command_ends_in_a_table_and_a_study(cli: Callable[..., tuple[int, str, str]], words: list[str], tmp_path: Path
                                                 ) -> None:
    off = [f"techniques.{name}=off" for name in ("attention_kernel", "micro_batch", "activation_checkpointing", "loader",
                                                  "chunked_cross_entropy", "flat_parameters")]
    code, out, err = cli("tune", *words, *off, "--budget", "3s", "--study", "proof")
    assert code == 0, err
    assert "without fused_adamw" in out
    assert "Noise  equal plans differ" in out
    evidence = json.loads((tmp_path / "studies" / "proof" / "evidence.json").read_text(encoding="utf-8"))
    assert evidence["kind"] == "tuning"
    assert set(evidence["findings"]) == {"recipe", "candidates", "chosen", "total", "control", "key"}
    assert [row["pins"] for row in evidence["findings"]["candidates"]] == [{"fused_adamw": "off"}]
