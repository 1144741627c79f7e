"""Updates that are not made: in every kind of update, on the device where it is fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.techniques.flat_parameters import FlatParameters
from powertrain.techniques.fp16 import Fp16
from powertrain.techniques.fused_adamw import FusedAdamW
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.torch_compile import TorchCompile
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.guard import Guard
from powertrain.training.loop import State, StepResult, new_state, train
from powertrain.training.optimizers import OPTIMIZERS, Optimizer
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.updates import RunOptimizer

MakeSetup = Callable[..., Setup]
STEPS = 6


def flat(setup: Setup) -> Setup:
    changed = FlatParameters().apply(setup)
    for enter_setting in changed.runtime:
        enter_setting()
    return changed


def compiled(setup: Setup) -> Setup:
    changed = TorchCompile().apply(setup)
    TorchCompile().confirm(changed)
    return changed


def with_optimizer(name: str) -> Callable[[Setup], Setup]:
    def change(setup: Setup) -> Setup:
        settings = OPTIMIZERS.settings(name, {})
        return FusedAdamW().apply(replace(setup, optimizer=Optimizer(OPTIMIZERS.named(name), 1e-2, settings=settings)))

    return change


KINDS: dict[str, Callable[[Setup], Setup]] = {
    "plain": lambda setup: setup, "fused": FusedAdamW().apply, "flat": flat,
    "flat, fused": lambda setup: flat(FusedAdamW().apply(setup)),
    "fused sgd with momentum": with_optimizer("sgd"), "compiled": lambda setup: compiled(setup),
    "passes": MicroBatch(5).apply, "fp16": lambda setup: Fp16().apply(setup),
    "fp16, flat, fused": lambda setup: flat(FusedAdamW().apply(Fp16().apply(setup)))}


def guarded(setup: Setup, *, spikes: bool = False) -> State:
    return replace(new_state(setup, 0.1), guard=Guard.on(setup.device, spikes=spikes))


def taken(setup: Setup, state: State, to: int = STEPS) -> list[StepResult]:
    return list(train(setup, state, Schedule("constant", 1e-2, to), 0.5))


def poisoned(setup: Setup, state: State, steps: set[int], factor: float) -> Setup:
    """The setup, with the loss of these steps (from 0) times `factor`, in the forward pass."""
    def loss(*arguments: Any) -> torch.Tensor:
        found = setup.loss(*arguments)
        return found * factor if state.step in steps else found

    return replace(setup, loss=loss)


def held(state: State) -> list[torch.Tensor]:
    """Weights, moments and step counts."""
    moments = [found[name] for found in state.optimizer.moments().values() for name in sorted(found)]
    return [value.detach().clone() for value in (*state.model.parameters(), *moments)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_a_loss_that_is_not_finite_changes_neither_weights_nor_moments_nor_step_counts(
        make_setup: MakeSetup, kind: str) -> None:
    setup = KINDS[kind](make_setup())
    state = guarded(setup)
    steps = train(poisoned(setup, state, {2, 3}, torch.nan), state, Schedule("constant", 1e-2, STEPS), 0.5)
    found = [next(steps), next(steps)]
    before = held(state)
    found += [next(steps), next(steps)]
    assert same(held(state), before)
    found += list(steps)
    assert not same(held(state), before)
    assert [bool(step.bad) for step in found] == [False, False, True, True, False, False]
    assert all(bool(torch.isfinite(value).all()) for value in held(state))


@pytest.mark.parametrize("kind", ["fused", "fused sgd with momentum", "flat, fused", "plain"])
def test_a_first_step_that_is_passed_over_leaves_the_next_one_as_a_first(make_setup: MakeSetup, kind: str) -> None:
    setup, other = KINDS[kind](make_setup()), KINDS[kind](make_setup())
    state, fresh = guarded(setup), guarded(other)
    taken(poisoned(setup, state, {0}, torch.nan), state, 3)
    assert fresh.guard is not None
    fresh.guard.passed_over = 1              # begins with the second batch
    taken(other, fresh, 2)
    assert same(held(state), held(fresh))


def test_a_fused_update_reads_the_verdict_on_the_device(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never asks for it, so that it can run ahead of a GPU."""
    setup = FusedAdamW().apply(make_setup())
    state = guarded(setup, spikes=True)
    taken(setup, state, 1)                   # the state is made
    step_unless, item, asked = RunOptimizer.step_unless, torch.Tensor.item, list[torch.Tensor]()

    class Watched(torch.Tensor):
        def __bool__(self) -> bool:
            asked.append(self)
            return super().__bool__()

    monkeypatch.setattr(RunOptimizer, "step_unless", lambda optimizer, bad: step_unless(optimizer, bad.as_subclass(Watched)))
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: asked.append(tensor) or item(tensor))
    taken(setup, state)
    assert not asked
    plain = make_setup()
    taken(plain, guarded(plain), 2)
    assert asked


@pytest.mark.parametrize("kind", ["fp16", "fp16, flat, fused"])
def test_a_step_that_overflows_in_fp16_is_skipped_and_not_bad(make_setup: MakeSetup, kind: str) -> None:
    setup = KINDS[kind](make_setup())
    state = guarded(setup)
    before = held(state)[:len(list(setup.model.parameters()))]
    found = taken(poisoned(setup, state, {0}, 1e35), state, 1)       # times the scale of 65,536 it overflows
    assert not torch.isfinite(found[0].grad_norm)
    assert not found[0].bad
    assert same(held(state)[:len(before)], before)
    assert state.scaler.get_scale() == 2.0**15


def test_a_spike_needs_a_full_window_and_the_window_is_in_the_checkpoint(
        make_setup: MakeSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.training.guard.WINDOW", 3)
    setup = FusedAdamW().apply(make_setup())
    state = guarded(setup, spikes=True)
    found = taken(poisoned(setup, state, {1}, 50.0), state, 4)
    assert not any(bool(step.bad) for step in found)
    saved = save_checkpoint(tmp_path, state)
    again = FusedAdamW().apply(make_setup())
    other = guarded(again, spikes=True)
    load_checkpoint(saved, other)
    assert state.guard is not None
    assert other.guard is not None
    assert torch.equal(state.guard.window, other.guard.window)  # type: ignore[arg-type]
    for one, made in ((state, setup), (other, again)):
        steps = taken(poisoned(made, one, {4, 6}, 5000.0), one, 8)
        assert [bool(step.bad) for step in steps] == [True, False, True, False]
    assert same(held(state), held(other))
