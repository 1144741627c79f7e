"""What a run does about bad steps: stop, go on without their updates, or go back to a checkpoint. See training/guard.py.

Every decision rests on the numbers of single steps, not on when the host reads them: a resumed run decides the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

from powertrain.recipe import Recipe
from powertrain.records import RunFailed, events
from powertrain.records.errors import GradientNotFinite, LossNotFinite, TooManyBadSteps
from powertrain.training.checkpoint import checkpoints_in, delete, if_writer, load_checkpoint, newest_checkpoint
from powertrain.training.guard import Guard

if TYPE_CHECKING:
    from powertrain.run.folder import RunFolder
    from powertrain.run.prepare import Prepared
    from powertrain.training.loop import State, StepResult
    from powertrain.training.ranks import Ranks
    from powertrain.training.setup import Setup


class Part(Protocol):
    """What is needed here of a process's part of a run (part.Part)."""

    prepared: Prepared
    setup: Setup
    state: State
    folder: RunFolder
    since_save: list[events.Step]

    @property
    def ranks(self) -> Ranks: ...

    def emit(self, event: events.Event, *, durable: bool = False) -> None: ...


def guard_of(recipe: Recipe, device: torch.device) -> Guard | None:
    """Return the guard of a new run, or None where the recipe asks for none."""
    if recipe.on_nan == "stop" and recipe.on_spike == "off":
        return None
    return Guard.on(device, spikes=recipe.on_spike != "off")


def may_rewind(recipe: Recipe) -> bool:
    """Return whether bad steps may bring a run back to a checkpoint; then the run saves its beginning too."""
    return "rewind" in (recipe.on_nan, recipe.on_spike)


def error_of(part: Part, result: StepResult, loss: float, norm: float) -> RunFailed | None:
    """Return the error of all processes where the step ends the run at once; else None.

    fp16's loss scaling passes over gradients that are not finite.
    """
    if part.prepared.recipe.on_nan != "stop" or _is_finite(part, loss, norm):
        return None
    if math.isfinite(loss):
        return GradientNotFinite(result.step, norm, _examples_of(part, result))
    process, examples = _bad_passes(part, result)
    return LossNotFinite(result.step, loss, process=process if part.ranks.world > 1 else None, examples=examples)


def skipped(part: Part, result: StepResult, loss: float, norm: float) -> events.UpdateSkipped | None:
    """Tell of an update that was not made; return what is told where the run has to rewind. Raises TooManyBadSteps."""
    guard, recipe, spike = part.state.guard, part.prepared.recipe, _is_finite(part, loss, norm)
    assert guard is not None
    guard.in_row += 1
    examples = () if math.isfinite(loss) else _bad_passes(part, result)[1]
    told = events.UpdateSkipped(step=result.step, loss=loss, grad_norm=norm, spike=spike, in_row=guard.in_row,
                                most=recipe.max_skipped_steps, examples=examples or _examples_of(part, result))
    part.emit(told)
    if guard.in_row <= recipe.max_skipped_steps:
        return None
    if (recipe.on_spike if spike else recipe.on_nan) != "rewind":
        raise _too_many(told, f"max_skipped_steps={told.most} allows no more")
    if guard.rewinds >= recipe.max_rewinds:
        raise _too_many(told, f"max_rewinds={recipe.max_rewinds} allows no further way back")
    return told


def rewind(part: Part, bad: events.UpdateSkipped) -> None:
    """Load the newest whole checkpoint from before the bad steps, and go on with the data after them.

    A checkpoint made between the bad steps holds the weights from before them. Those of later steps than the loaded one are
    deleted: the steps come again, with other data.
    """
    state, guard, folder = part.state, part.state.guard, part.folder.checkpoints
    assert guard is not None
    rewinds, next_batch, found = guard.rewinds + 1, bad.step + guard.passed_over, None
    if part.ranks.is_writer:
        found = newest_checkpoint(folder, bad.step - bad.in_row)[0] or newest_checkpoint(folder)[0]
    if (found := part.ranks.agree(found)) is None:
        raise _too_many(bad, "there is no whole checkpoint to go back to")
    state.optimizer.state.clear()            # step 0 has none that would take its place
    load_checkpoint(found, state)
    guard.in_row, guard.rewinds, guard.passed_over = 0, rewinds, next_batch - state.step
    part.since_save.clear()
    try:
        if_writer(part.ranks, lambda: delete(path for step, path in checkpoints_in(folder).items() if step > state.step))
    except OSError as error:
        raise RunFailed(f"the run went back to step {state.step:,}, and a later checkpoint in {folder} could not be deleted: "
                        f"{error.strerror or error}. Delete it, then `powertrain train --resume {part.folder.path}`") from None
    part.emit(events.Rewound(step=state.step, bad_step=bad.step, in_row=bad.in_row, examples=bad.examples, rewinds=rewinds,
                             passed_over=guard.passed_over, most=part.prepared.recipe.max_rewinds), durable=True)


def _is_finite(part: Part, loss: float, norm: float) -> bool:
    return math.isfinite(loss) and (part.setup.precision.loss_scaling or math.isfinite(norm))


def _too_many(bad: events.UpdateSkipped, why: str) -> TooManyBadSteps:
    return TooManyBadSteps(bad.step, bad.in_row, why, bad.examples)


def _batch_of(part: Part, result: StepResult) -> int:
    """Return the number (from 0) of the step's batch in the order of the data."""
    return result.step - 1 + part.state.batch - part.state.step


def _examples_of(part: Part, result: StepResult) -> tuple[int, ...]:
    return tuple(part.setup.numbers_of(_batch_of(part, result)))


def _bad_passes(part: Part, result: StepResult) -> tuple[int | None, tuple[int, ...]]:
    """Return the first process that has passes whose loss is not finite, and the examples of these.

    Where all passes of the step have such a loss: None and nothing.
    """
    wrong = [place for place, term in result.terms.items() if not math.isfinite(term)]
    everywhere = part.ranks.each((wrong, len(result.terms)))
    process = next((rank for rank, (places, _) in enumerate(everywhere) if places), None)
    if process is None or all(len(places) == passes for places, passes in everywhere):
        return None, ()
    return process, tuple(part.setup.numbers_in(_batch_of(part, result), everywhere[process][0]))
