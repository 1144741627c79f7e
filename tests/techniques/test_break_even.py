"""Code is compiled where the run earns that back, and not where it is one step too short."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kinds_of_runs import make_ragged, ragged_facts

from powertrain import planner
from powertrain.cost.estimate import estimate
from powertrain.models.kernels import build
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, Plan, Proposal
from powertrain.records.sizes import digits
from powertrain.techniques import attention_kernel, fused_blocks, torch_compile
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import WORTH_IT
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.torch_compile import TorchCompile
from powertrain.training.loop import apply_plan, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup


@dataclass(frozen=True)
class Compiling:
    """Something that is compiled for a run: what it takes, what it saves, and whether a plan has it."""

    technique: str
    compile_s: float
    gain: tuple[float, float]
    is_on: Callable[[Facts, Recipe], bool]
    kind: str                                # of data


def proposed(technique: Any, **settings: object) -> Callable[[Facts, Recipe], bool]:
    def is_on(facts: Facts, recipe: Recipe) -> bool:
        answer = ask_anew(technique.name, facts, recipe)
        found = vars(answer.technique).items() if isinstance(answer, Proposal) else None
        return found is not None and settings.items() <= found

    return is_on


KINDS = {
    "torch_compile": Compiling("torch_compile", torch_compile.COMPILE_S["cpu"], torch_compile.GAIN["cpu"],
                               proposed(TorchCompile), "blocks"),
    "fused blocks": Compiling("fused_blocks", fused_blocks.COMPILE_S["cpu"], fused_blocks.DROPPING_GAIN,
                              proposed(FusedBlocks, ahead=True), "dropout"),
    "fused blocks by our own kernel": Compiling("fused_blocks", fused_blocks.CPP_COMPILE_S["cpp"], fused_blocks.GAIN["cpu"],
                                                proposed(FusedBlocks, kernels="cpp"), "examples"),
    "the ragged kernel": Compiling("attention_kernel", attention_kernel.COMPILE_S, attention_kernel.RAGGED_GAIN,
                                   proposed(AttentionKernel, kernel="ragged"), "examples")}


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_built", lambda *_: False)
    monkeypatch.setattr(build, "load", lambda *_: None)


@pytest.fixture
def machines(facts: Facts) -> dict[str, Facts]:
    """A CPU with a compiler and a model that keeps it busy, by the kind of data."""
    hardware = replace(facts.hardware, device="cpu", instructions=(), peak_flops_per_s={"fp32": 2e11},
                       bandwidth_bytes_per_s=4e10)
    software = replace(facts.software, missing={})
    model = replace(ragged_facts(facts, None).model, layers=12, width=512, matmul_parameters=38_000_000)
    found = {"blocks": facts, "examples": ragged_facts(facts, None)}
    machines = {kind: replace(one, hardware=hardware, software=software, model=model) for kind, one in found.items()}
    return machines | {"dropout": replace(machines["examples"], model=replace(model, dropout=0.2))}


def step_s(facts: Facts, technique: str) -> float:
    """Of a step without compiled code, as the techniques before this one have decided it."""
    work = replace(planner._before(technique, facts, Recipe()).decided, compiled=False, fused_blocks=False)
    return sum(estimate(facts.model, work, facts.hardware, 1).step_s) / 2


def least_steps(facts: Facts, one: Compiling) -> int:
    """Of a run that saves as many times what compiling takes as it has to."""
    return math.ceil(WORTH_IT * one.compile_s / (step_s(facts, one.technique) * (1 - sum(one.gain) / 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_too_few_and_nothing_is_compiled(kind: str, machines: dict[str, Facts]) -> None:
    one = KINDS[kind]
    facts = machines[one.kind]
    steps = least_steps(facts, one)
    assert steps > 10
    assert not one.is_on(facts, Recipe(max_steps=steps - 1))
    assert one.is_on(facts, Recipe(max_steps=steps))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_so_many_seconds_or_epochs_is_as_long(kind: str, machines: dict[str, Facts]) -> None:
    one = KINDS[kind]
    facts = machines[one.kind]
    needed_s = least_steps(facts, one) * step_s(facts, one.technique)
    assert not one.is_on(facts, Recipe(train_time_s=0.99 * needed_s))
    assert one.is_on(facts, Recipe(train_time_s=1.01 * needed_s))
    epochs = least_steps(facts, one) * facts.data.train_batch_size / facts.data.examples
    assert not one.is_on(facts, Recipe(num_train_epochs=0.98 * epochs, train_batch_size=facts.data.train_batch_size))
    assert one.is_on(facts, Recipe(num_train_epochs=1.02 * epochs, train_batch_size=facts.data.train_batch_size))


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_compiles_on_a_machine_whose_speed_is_unknown(kind: str, machines: dict[str, Facts]) -> None:
    one = KINDS[kind]
    facts = machines[one.kind]
    unmeasured = replace(facts, hardware=replace(facts.hardware, peak_flops_per_s={}))
    assert not one.is_on(unmeasured, Recipe(max_steps=10**7))


def test_the_numbers_of_the_sentence_are_those_of_the_bargain(machines: dict[str, Facts]) -> None:
    facts = machines["examples"]
    run = planner._before("fused_blocks", facts, Recipe(max_steps=3000))
    steps, one_s = 3000, step_s(facts, "fused_blocks")
    saved = steps * one_s * 0.25
    pays, shown = run.bargain((0.7, 0.8), saved / 4)
    assert pays
    assert f"would save about {digits(saved)} s of the {digits(steps * one_s)} s that the steps take without it" in shown
    assert shown.endswith("so it pays after step 750 of 3,000")
    assert not run.bargain((0.7, 0.8), saved / 1.99)[0]


@pytest.mark.parametrize("kind", ["blocks", "examples"])
def test_a_run_too_short_compiles_nothing_from_its_plan_to_its_end(kind: str, machines: dict[str, Facts],
                                                                   make_setup: Callable[..., Setup],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((torch, "compile"), (build, "load")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was compiled"))
    plan = make_plan(machines[kind], Recipe(max_steps=3), 3)
    setup = apply_plan(make_setup() if kind == "blocks" else make_ragged(None), Plan(plan.steps, ()))
    assert len(list(train(setup, new_state(setup, 0.1), Schedule("constant", 1e-3, 3), 1.0))) == 3
    shown = {refusal.technique: refusal.because for refusal in plan.refused}
    assert "only if it saves 2 times its own time" in shown["torch_compile" if kind == "blocks" else "fused_blocks"]
