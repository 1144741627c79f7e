"""Ablation, with timings that are made up and, where it matters, losses that are real."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic_arena import Steps, SyntheticArena

from driver import TINY
from powertrain import planner
from powertrain.evidence.ablation import Subject, ablate, subjects_of
from powertrain.evidence.notebook import Notebook, why_no_room
from powertrain.evidence.profile import CLASSES
from powertrain.models.kernels.losses import token_loss
from powertrain.recipe import resolve_words
from powertrain.records import Effect, NotApplied, Plan, Proposal, RunFailed, WrongUse
from powertrain.records.evidence import FASTER, HARMFUL, INCONCLUSIVE, INVALID, NO_EFFECT, NOT_HERE
from powertrain.run.prepare import Prepared, prepare
from powertrain.techniques import CATALOGUE, Technique
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.four_bit_base import FourBitBase
from powertrain.techniques.frozen_base import FrozenBase
from powertrain.training.setup import Setup

OFF = ["allocator", "bf16", "torch_compile", "fused_blocks", "activation_checkpointing", "loader", "chunked_cross_entropy"]


@pytest.fixture
def words(source: Path) -> list[str]:
    """In force on every machine: fused_adamw, attention_kernel, micro_batch."""
    return [f"data={source}", *TINY, *(f"techniques.{name}=off" for name in OFF)]


@pytest.fixture
def prepared(words: list[str], cache: Path) -> Prepared:
    return prepare(resolve_words(words), cache, lambda text: None)


class Saboteur(Technique):
    """Registered by a test. What it does, its subclasses say."""

    exactness = Exactness.ROUNDING
    touches = frozenset({"loss"})
    source = "a test"
    does = "harms on purpose"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal:
        return Proposal(cls(), "a test wants it", Effect((1.0, 1.0), 0, "guess: a test"))

    def apply(self, setup: Setup) -> Setup:
        return dataclasses.replace(setup, loss=lambda *arguments: token_loss(*arguments))

    def confirm(self, setup: Setup) -> None:
        if setup.loss is token_loss:
            raise NotApplied(f"{self.name}: the loss is the plain one")


@dataclasses.dataclass(frozen=True)
class NoOp(Saboteur):
    name = "no_op"

    def apply(self, setup: Setup) -> Setup:
        return setup


@dataclasses.dataclass(frozen=True)
class OtherMathematics(Saboteur):
    name = "other_mathematics"

    def apply(self, setup: Setup) -> Setup:
        return dataclasses.replace(setup, loss=lambda *arguments: 1.02 * token_loss(*arguments))


@dataclasses.dataclass(frozen=True)
class Slow(Saboteur):
    name = "slow"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Technique]], None]:
    def add(technique: type[Technique]) -> None:
        monkeypatch.setitem(planner.BY_NAME, technique.name, technique)  # type: ignore[arg-type]

    return add


def costs(**seconds: float) -> Callable[[Steps], float]:
    """A step takes 1 s, and for each technique that is in force these seconds more or less."""
    return lambda steps: 1.0 + sum(seconds.get(name, 0.0) for name in steps)


def measure(prepared: Prepared, arena: SyntheticArena, names: Sequence[str] = (), *, budget_s: float = 1000.0,
            said: list[str] | None = None) -> tuple[dict[str, Subject], dict[str, Any], Notebook]:
    notebook = Notebook(arena, ("a", "recipe"), ([] if said is None else said).append, budget_s, now=arena.now)
    subjects = subjects_of(prepared, names)
    found = ablate(prepared, subjects, notebook)
    json.dumps(found, allow_nan=False)
    return {subject.name: subject for subject in subjects}, found, notebook


def test_each_technique_gets_the_verdict_of_leaving_it_out(prepared: Prepared) -> None:
    arena = SyntheticArena(costs(fused_adamw=-0.2, attention_kernel=0.1), noise=0.01)
    subjects, findings, notebook = measure(prepared, arena)
    assert {name: subject.verdict for name, subject in subjects.items()} == {
        "fused_adamw": FASTER, "attention_kernel": HARMFUL, "micro_batch": NO_EFFECT}
    assert all(subject.why for subject in subjects.values())
    assert notebook.comparisons[findings["control"]].verdict == NO_EFFECT
    total = notebook.comparisons[findings["total"]]
    assert (total.a, total.b, total.verdict) == ("no technique", "full plan", FASTER)


def test_the_findings_have_what_reports_read(prepared: Prepared) -> None:
    _, findings, _ = measure(prepared, SyntheticArena(costs()))
    assert set(findings) == {"recipe", "profile", "control", "total", "techniques"}
    assert set(findings["profile"]) == {"plain", "plan"}
    for row in findings["techniques"]:
        assert set(row) == {"name", "settings", "exactness", "because", "claim", "acts_on", "bound", "ladder", "left_out",
                            "speed", "memory_bytes", "parity", "verdict", "why"}


def test_a_technique_that_makes_the_step_a_tenth_slower_is_harmful(
        words: list[str], cache: Path, register: Callable[[type[Technique]], None]) -> None:
    register(Slow)
    prepared = prepare(resolve_words(words), cache, lambda text: None)
    for seed in range(5):
        subjects, _, _ = measure(prepared, SyntheticArena(costs(slow=0.1), noise=0.02, seed=seed))
        assert subjects["slow"].verdict == HARMFUL


def test_a_technique_that_does_nothing_is_caught_by_its_confirmation(
        words: list[str], cache: Path, tmp_path: Path, register: Callable[[type[Technique]], None]) -> None:
    register(NoOp)
    prepared = prepare(resolve_words(words), cache, lambda text: None)
    prepared = dataclasses.replace(prepared, plan=_only(prepared.plan, "no_op"))
    with pytest.raises(RunFailed, match="no_op: the loss is the plain one"):
        _measure_really(prepared, words, tmp_path)


def test_a_technique_that_changes_the_mathematics_is_caught_by_its_losses(
        words: list[str], cache: Path, tmp_path: Path, register: Callable[[type[Technique]], None]) -> None:
    register(OtherMathematics)
    prepared = prepare(resolve_words(words), cache, lambda text: None)
    prepared = dataclasses.replace(prepared, plan=_only(prepared.plan, "other_mathematics", "fused_adamw"))
    subjects = _measure_really(prepared, words, tmp_path, other_mathematics=-0.3)
    assert subjects["other_mathematics"].verdict == INVALID
    assert "changes what is learned" in subjects["other_mathematics"].why
    fused = subjects["fused_adamw"].parity
    assert fused is not None
    assert fused.holds


def _only(plan: Plan, *names: str) -> Plan:
    return dataclasses.replace(plan, steps=tuple(step for step in plan.steps if step.technique.name in names))


def _measure_really(prepared: Prepared, words: list[str], scratch: Path,
                    **seconds: float) -> dict[str, Subject]:
    arena = SyntheticArena(costs(**seconds), real_probes=scratch)
    notebook = Notebook(arena, tuple(words), lambda text: None, 1000.0, now=arena.now)
    subjects = subjects_of(prepared)
    ablate(prepared, subjects, notebook)
    return {subject.name: subject for subject in subjects}


def test_what_cannot_matter_is_said_and_not_timed(prepared: Prepared) -> None:
    classes = {**dict.fromkeys(CLASSES, 0.165), "optimizer": 0.01}
    arena = SyntheticArena(costs(), classes=classes)
    said: list[str] = []
    subjects, _, _ = measure(prepared, arena, said=said)
    assert subjects["fused_adamw"].verdict == NO_EFFECT
    assert "not timed" in subjects["fused_adamw"].why
    assert subjects["fused_adamw"].left_out is None
    assert subjects["fused_adamw"].memory_bytes is not None
    assert not [pair for pair in arena.compared if set(pair[1]) - set(pair[0]) == {"fused_adamw"}]
    assert subjects["fused_adamw"].ladder == subjects["attention_kernel"].ladder
    bounds = next(index for index, text in enumerate(said) if text.startswith("fused_adamw: at most 1.01"))
    assert bounds < next(index for index, text in enumerate(said) if "against itself" in text)


def test_memory_is_that_of_the_plan_with_and_without_it(prepared: Prepared) -> None:
    arena = SyntheticArena(costs(), memory=lambda steps: 1000 - 300 * ("micro_batch" in steps))
    subjects, _, _ = measure(prepared, arena)
    assert subjects["micro_batch"].memory_bytes == -300
    assert subjects["fused_adamw"].memory_bytes == 0


def test_what_cannot_stand_without_it_is_left_out_with_it(prepared: Prepared) -> None:
    plan = planner.with_steps(prepared.plan, [_step(Bf16()), _step(FrozenBase())])

    def cannot(steps: Steps) -> str | None:
        return "frozen_base: products are computed in fp32" if "frozen_base" in steps and "bf16" not in steps else None

    arena = SyntheticArena(costs(bf16=-0.3), cannot=cannot)
    subjects, _, notebook = measure(dataclasses.replace(prepared, plan=plan), arena)
    assert subjects["bf16"].verdict == FASTER
    assert "frozen_base was left out too" in subjects["bf16"].why
    left_out = subjects["bf16"].left_out
    assert left_out is not None
    assert notebook.comparisons[left_out].a == "without bf16 and frozen_base"
    assert subjects["frozen_base"].verdict == NO_EFFECT


def test_a_rung_that_cannot_stand_is_joined_with_the_next(prepared: Prepared) -> None:
    def cannot(steps: Steps) -> str | None:
        alone = "attention_kernel" in steps and "micro_batch" not in steps
        return "attention_kernel: it needs the passes of micro_batch" if alone else None

    subjects, _, notebook = measure(prepared, SyntheticArena(costs(), cannot=cannot))
    assert subjects["attention_kernel"].ladder == subjects["micro_batch"].ladder
    assert subjects["attention_kernel"].ladder is not None
    assert "it joins the next" in subjects["attention_kernel"].why
    assert subjects["fused_adamw"].ladder != subjects["attention_kernel"].ladder
    assert notebook.comparisons[subjects["attention_kernel"].ladder].b == "full plan"


def test_no_pair_of_plans_is_measured_twice(prepared: Prepared) -> None:
    arena = SyntheticArena(costs())
    measure(prepared, arena)
    pairs = [tuple(tuple(sorted(steps)) for steps in pair) for pair in arena.compared]
    assert len(pairs) == len(set(pairs))


def test_the_ladder_climbs_from_nothing_to_the_full_plan(prepared: Prepared) -> None:
    arena = SyntheticArena(costs())
    subjects, _, notebook = measure(prepared, arena)
    rungs = [subject.ladder for subject in subjects.values()]
    comparisons = [notebook.comparisons[rung] for rung in rungs if rung is not None]
    assert len(comparisons) == len(subjects)
    assert comparisons[0].a == "no technique"
    assert comparisons[-1].b == "full plan"
    assert all(below.b == above.a for below, above in itertools.pairwise(comparisons))


def test_what_the_budget_does_not_reach_is_said(prepared: Prepared) -> None:
    said: list[str] = []
    subjects, findings, notebook = measure(prepared, SyntheticArena(costs(), takes_s=100.0), budget_s=250.0, said=said)
    assert [subject.left_out is not None for subject in subjects.values()] == [True, False, False]
    assert subjects["micro_batch"].verdict == INCONCLUSIVE
    assert "not reached within the budget" in subjects["micro_batch"].why
    assert findings["total"] is None
    assert any("no technique against the full plan: not reached" in text for text in said)
    assert all(comparison.pairs >= 5 for comparison in notebook.comparisons)


def test_what_is_undecided_takes_the_time_that_is_left(prepared: Prepared) -> None:
    """Five pairs cannot tell 4 % at this noise; the hundreds that the budget has room for can."""
    said: list[str] = []
    arena = SyntheticArena(costs(fused_adamw=-0.04), noise=0.04, seed=3)
    subjects, _, notebook = measure(prepared, arena, ["fused_adamw"], said=said)
    first = next(comparison for comparison in notebook.comparisons if comparison.a == "without fused_adamw")
    assert (first.pairs, first.verdict) == (5, INCONCLUSIVE)
    left_out = subjects["fused_adamw"].left_out
    assert left_out is not None
    assert notebook.comparisons[left_out].pairs > 100
    assert subjects["fused_adamw"].verdict == FASTER
    assert any("measuring again with the remaining time" in text for text in said)
    first_only, _, _ = measure(prepared, SyntheticArena(costs(fused_adamw=-0.04), noise=0.04, seed=3), ["fused_adamw"],
                               budget_s=60.0)
    assert first_only["fused_adamw"].verdict == INCONCLUSIVE


def test_a_machine_that_is_too_noisy_says_so(prepared: Prepared) -> None:
    subjects, _, notebook = measure(prepared, SyntheticArena(costs(), noise=0.3, seed=3))
    assert notebook.margin > 0.05
    assert all(subject.verdict == INCONCLUSIVE for subject in subjects.values())


def test_one_technique_alone_can_be_asked_for(prepared: Prepared) -> None:
    arena = SyntheticArena(costs(micro_batch=0.2))
    subjects, findings, _ = measure(prepared, arena, ["micro_batch"])
    assert list(subjects) == ["micro_batch"]
    assert subjects["micro_batch"].verdict == HARMFUL
    assert findings["total"] is None


def test_a_technique_that_the_plan_leaves_off_can_be_asked_for(prepared: Prepared) -> None:
    arena = SyntheticArena(costs(loader=0.2))
    subjects, _, notebook = measure(prepared, arena, ["loader"])
    assert subjects["loader"].verdict == HARMFUL
    left_out = subjects["loader"].left_out
    assert left_out is not None
    assert (notebook.comparisons[left_out].a, notebook.comparisons[left_out].b) == ("full plan", "with loader")


def test_what_cannot_be_here_is_refused_with_the_reason(prepared: Prepared) -> None:
    with pytest.raises(WrongUse, match="packing cannot be measured here: all examples have 16 tokens"):
        subjects_of(prepared, ["packing"])
    with pytest.raises(WrongUse, match=r"did you mean bf16\?"):
        subjects_of(prepared, ["bf61"])


def test_a_plan_without_techniques_has_nothing_to_leave_out(prepared: Prepared) -> None:
    with pytest.raises(WrongUse, match="no technique that could be left out"):
        subjects_of(dataclasses.replace(prepared, plan=Plan((), ())))


def test_what_the_method_means_is_not_left_out(prepared: Prepared) -> None:
    plan = planner.with_steps(prepared.plan, [_step(FourBitBase())])
    arena = SyntheticArena(costs())
    subjects, findings, _ = measure(dataclasses.replace(prepared, plan=plan), arena)
    assert subjects["four_bit_base"].verdict == NOT_HERE
    assert findings["total"] is not None
    assert all("four_bit_base" in steps for pair in arena.compared for steps in pair)


def test_a_plan_that_cannot_fit_is_not_tried(prepared: Prepared) -> None:
    small = dataclasses.replace(prepared.facts.hardware, free_memory_bytes=1 << 10)
    assert why_no_room(prepared.plan, prepared.facts) is None
    assert "are free" in str(why_no_room(prepared.plan, dataclasses.replace(prepared.facts, hardware=small)))


def test_every_technique_acts_on_known_classes_of_work() -> None:
    assert set(CLASSES) == EVERYTHING
    for technique in CATALOGUE:
        assert technique.acts_on
        assert technique.acts_on <= EVERYTHING


def _step(technique: Technique) -> Proposal:
    return Proposal(technique, "a test", Effect((1.0, 1.0), 0, "guess: a test"))


def test_the_command_ends_in_a_table_and_a_study(cli: Callable[..., tuple[int, str, str]], words: list[str], tmp_path: Path
                                                 ) -> None:
    off = [f"techniques.{name}=off" for name in ("attention_kernel", "micro_batch")]
    kept = [word for word in words if not word.startswith("techniques.micro_batch")]
    code, out, err = cli("ablate", *kept, *off, "--budget", "3s", "--study", "proof", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["event"] == "ablation"
    assert [row["name"] for row in found["findings"]["techniques"]] == ["fused_adamw"]
    evidence = json.loads((tmp_path / "studies" / "proof" / "evidence.json").read_text(encoding="utf-8"))
    assert evidence["kind"] == "ablation"
    assert evidence["comparisons"][evidence["findings"]["control"]]["b"] == "full plan again"
    assert "fused_adamw: at most" in err
