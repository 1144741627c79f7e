"""What a run does about bad steps: stop, go on without their updates, or go back to a checkpoint. See training/guard.py.

Every decision rests on the numbers of single steps, not on when the host reads them: a resumed run decides the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from powertrain.recipe import Recipe
from powertrain.records import RunFailed, events
from powertrain.records.errors import GradientNotFinite, LossNotFinite, TooManyBadSteps
from powertrain.training.guard import Guard

if TYPE_CHECKING:
    from powertrain.training.loop import StepResult
    from powertrain.training.setup import Setup


def guard_of(recipe: Recipe, device: torch.device) -> Guard | None:
    """Return the guard of a new run, or None where the recipe asks for none."""
    if recipe.on_nan == "stop" and recipe.on_spike == "off":
        return None
    return Guard.on(device, spikes=recipe.on_spike != "off")


def error_of(recipe: Recipe, setup: Setup, result: StepResult, loss: float, norm: float) -> RunFailed | None:
    """Return the error of all processes where the step ends the run at once; else None."""
    if recipe.on_nan != "stop" or _is_finite(setup, loss, norm):
        return None
    if math.isfinite(loss):
        return GradientNotFinite(result.step, norm, tuple(setup.numbers_of(result.batch)))
    process, examples = _bad_passes(setup, result)
    return LossNotFinite(result.step, loss, process=process if setup.ranks.world > 1 else None, examples=examples)


def skipped(recipe: Recipe, setup: Setup, guard: Guard, result: StepResult, loss: float, norm: float) -> events.UpdateSkipped:
    """Return what is told of an update that was not made, and count it."""
    guard.in_row += 1
    examples = () if math.isfinite(loss) else _bad_passes(setup, result)[1]
    return events.UpdateSkipped(step=result.step, loss=loss, grad_norm=norm, spike=_is_finite(setup, loss, norm),
                                in_row=guard.in_row, most=recipe.max_skipped_steps,
                                examples=examples or tuple(setup.numbers_of(result.batch)))


def must_rewind(recipe: Recipe, guard: Guard, told: events.UpdateSkipped) -> bool:
    """Return whether the run has to go back to a checkpoint. Raises TooManyBadSteps where it has to end."""
    if told.in_row <= told.most:
        return False
    if (recipe.on_spike if told.spike else recipe.on_nan) != "rewind":
        raise too_many(told, f"max_skipped_steps={told.most} allows no more")
    if guard.rewinds >= recipe.max_rewinds:
        raise too_many(told, f"max_rewinds={recipe.max_rewinds} allows no further way back")
    return True


def too_many(told: events.UpdateSkipped, why: str) -> TooManyBadSteps:
    """Return the error of a run that has to end after this step."""
    return TooManyBadSteps(told.step, told.in_row, why, told.examples)


def _is_finite(setup: Setup, loss: float, norm: float) -> bool:
    """Return whether loss and norm are finite. fp16's loss scaling passes over gradients that are not."""
    return math.isfinite(loss) and (setup.precision.loss_scaling or math.isfinite(norm))


def _bad_passes(setup: Setup, result: StepResult) -> tuple[int | None, tuple[int, ...]]:
    """Return the first process that has passes whose loss is not finite, and the examples of these.

    Where all passes of the step have such a loss: None and nothing.
    """
    wrong = [place for place, term in result.terms.items() if not math.isfinite(term)]
    everywhere = setup.ranks.each((wrong, len(result.terms)))
    process = next((rank for rank, (places, _) in enumerate(everywhere) if places), None)
    if process is None or all(len(places) == passes for places, passes in everywhere):
        return None, ()
    return process, tuple(setup.numbers_in(result.batch, everywhere[process][0]))
