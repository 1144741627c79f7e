"""What parity lets pass and what it catches, on real runs of a tiny model where a run is what matters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from powertrain.evidence.parity import compare_losses
from powertrain.evidence.worker import Probe
from powertrain.records import IGNORE
from powertrain.training.loop import new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Precision, Setup


def traced(losses: tuple[float, ...], grad_norms: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> Probe:
    return Probe(losses, grad_norms, None)


def run(setup: Setup, steps: int = 4, learning_rate: float = 1e-2) -> Probe:
    torch.manual_seed(0)
    taken = list(train(setup, new_state(setup, 0.1), Schedule("constant", learning_rate, steps), 1.0))
    return traced(tuple(result.loss.item() for result in taken), tuple(result.grad_norm.item() for result in taken))


Make = Callable[..., Setup]


def test_the_same_run_twice_is_the_same_to_the_bit(make_setup: Make) -> None:
    found = compare_losses("BITWISE", run(make_setup()), run(make_setup()), dtype="fp32")
    assert found.holds
    assert found.steps == 4
    assert found.loss_difference == found.grad_norm_difference == 0


def test_other_passes_are_the_same_but_for_rounding_and_not_to_the_bit(make_setup: Make) -> None:
    whole, split = run(make_setup()), run(replace(make_setup(), micro_batch=5))
    assert compare_losses("ROUNDING", whole, split, dtype="fp32").holds
    assert not compare_losses("BITWISE", whole, split, dtype="fp32").holds


def test_bf16_is_the_same_but_for_its_rounding(make_setup: Make) -> None:
    half = run(replace(make_setup(), precision=Precision(torch.bfloat16)))
    assert compare_losses("ROUNDING", run(make_setup()), half, dtype="bf16").holds
    assert not compare_losses("ROUNDING", run(make_setup()), half, dtype="fp32").holds


def with_loss(setup: Setup, change: Callable[..., Any]) -> Setup:
    return replace(setup, loss=partial(change, setup.loss))


def scaled(loss: Any, model: Any, hidden: Any, targets: Any, trained: int) -> Any:
    return loss(model, hidden, targets) * 1.02


def scaled_gradients_only(loss: Any, model: Any, hidden: Any, targets: Any, trained: int) -> Any:
    found = loss(model, hidden, targets)
    return found.detach() + (found - found.detach()) * 1.02


def with_fewer_tokens(loss: Any, model: Any, hidden: Any, targets: Any, trained: int) -> Any:
    kept = targets.masked_fill(torch.arange(len(targets)) % 50 == 0, IGNORE)
    return loss(model, hidden, kept) * (targets != IGNORE).sum() / (kept != IGNORE).sum()


@pytest.mark.parametrize("change", [scaled, scaled_gradients_only, with_fewer_tokens])
def test_a_slightly_other_loss_is_caught(make_setup: Make, change: Callable[..., Any]) -> None:
    assert not compare_losses("ROUNDING", run(make_setup()), run(with_loss(make_setup(), change)), dtype="fp32").holds


def test_a_gradient_that_is_always_a_little_too_large_is_caught_in_bf16_too(make_setup: Make) -> None:
    """Each step is within what bf16 does to a step."""
    setup = replace(make_setup(), precision=Precision(torch.bfloat16))
    found = compare_losses("ROUNDING", run(make_setup()), run(with_loss(setup, scaled_gradients_only)), dtype="bf16")
    assert found.grad_norm_difference < 0.05
    assert not found.holds


def test_a_slightly_other_learning_rate_is_caught(make_setup: Make) -> None:
    plain, hasty = run(make_setup()), run(make_setup(), learning_rate=1.02e-2)
    assert plain.losses[0] == hasty.losses[0], "the first step cannot show it"
    assert not compare_losses("ROUNDING", plain, hasty, dtype="fp32").holds


def test_a_gradient_that_stays_zero_is_caught_where_the_losses_are_close() -> None:
    a, b = traced((5.0, 4.99999, 4.99998)), traced((5.0, 5.0, 5.0), (0.0, 0.0, 0.0))
    assert not compare_losses("ROUNDING", a, b, dtype="bf16").holds


def test_gradients_that_only_balance_out_are_caught() -> None:
    a, b = traced((5.0, 4.0, 3.0, 2.0)), traced((5.0, 4.0, 3.0, 2.0), (1.2, 0.8, 1.2, 0.8))
    assert not compare_losses("ROUNDING", a, b, dtype="bf16").holds


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_nothing_that_rounding_explains(broken: float) -> None:
    a, b = traced((5.0, 4.0, 3.0)), traced((5.0, 4.0, broken))
    assert not compare_losses("ROUNDING", a, b, dtype="bf16").holds


def test_one_step_is_not_enough_to_compare() -> None:
    with pytest.raises(ValueError, match="needs 3 steps"):
        compare_losses("ROUNDING", traced((5.0,)), traced((5.0,)), dtype="fp32")


def seeds(*ends: float) -> list[Probe]:
    return [traced((5.0, 4.0, 3.0, end)) for end in ends]


def test_other_mathematics_may_differ_by_what_seeds_differ() -> None:
    without = seeds(2.0, 2.1, 2.2)
    assert compare_losses("LOSSY", without, seeds(2.05, 2.15, 2.25), dtype="fp32").holds
    assert compare_losses("LOSSY", without, seeds(1.0, 1.1, 1.2), dtype="fp32").holds, "better is no fault"
    assert not compare_losses("LOSSY", without, seeds(2.2, 2.3, 2.4), dtype="fp32").holds
    assert not compare_losses("LOSSY", without, seeds(2.0, math.nan, 2.2), dtype="fp32").holds


def test_other_mathematics_is_not_judged_by_one_seed() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        compare_losses("LOSSY", seeds(2.0), seeds(2.0), dtype="fp32")
