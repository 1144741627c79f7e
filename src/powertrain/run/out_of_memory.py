"""A step that does not fit the memory is repeated in smaller passes: same examples, same batch, same update up to rounding.

Clearing the gradients is enough, for a pass that ran out of memory left weights and optimizer as they were. With dropout the
second try draws other masks than the first: the random numbers that the failed pass drew are spent.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import torch

from powertrain import planner
from powertrain.records.errors import DoesNotFit
from powertrain.records.events import OutOfMemory
from powertrain.run.fits import cures
from powertrain.run.folder import write_json
from powertrain.run.part import Part
from powertrain.run.prepare import Prepared
from powertrain.training.loop import State
from powertrain.training.ranks import ALONE
from powertrain.training.setup import Setup


def go_on_smaller(part: Part, said: str) -> None:
    """Halve the passes of the plan, in force and on disk. Raises DoesNotFit where that is impossible."""
    step, before = part.state.step, largest_pass(part.setup, part.state.step)
    if part.watch.updating:
        raise DoesNotFit(step + 1, said, before, cures(part.prepared, judged=False), updating=True)
    clear_step(part.state)
    smaller = with_smaller_passes(part.prepared, part.setup, step)
    if smaller is None:
        raise DoesNotFit(step + 1, said, before, cures(part.prepared, judged=False))
    part.prepared, part.setup = smaller
    part.step_s.clear()
    part.taken = 0
    if part.ranks.is_writer:
        write_json(part.folder.plan, planner.to_json(part.prepared.plan))
    part.emit(OutOfMemory(step=step, before_tokens=before, after_tokens=largest_pass(part.setup, step),
                          train_batch_size=part.setup.train_batch_size, said=said))


def clear_step(state: State) -> None:
    """Undo everything that an unfinished step has left behind."""
    state.optimizer.zero_grad(set_to_none=True)
    if state.scaler.is_enabled():
        with contextlib.suppress(AssertionError):        # nothing was unscaled yet
            state.scaler.update()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_smaller_passes(prepared: Prepared, setup: Setup, step: int) -> tuple[Prepared, Setup] | None:
    """Return plan and setup with the largest pass of `step` (from 0) about halved, at the same batch; None where impossible.

    Blocks that were compiled for the old passes run uncompiled in the new ones until the run is resumed.
    """
    before, plan, changed = largest_pass(setup, step), prepared.plan, setup
    because = f"passes of {before:,} tokens ran out of memory at step {step + 1:,}"
    while largest_pass(changed, step) >= before:
        found = planner.with_smaller_passes(prepared.facts, plan, prepared.total_steps, because)
        if found is None:
            return None
        plan, technique = found
        changed = technique.apply(changed)
    return replace(prepared, plan=plan), changed


def largest_pass(setup: Setup, step: int) -> int:
    """Return the slots of the largest pass of a step (from 0), of all processes together."""
    return max(sum(batch.lengths) + (sum(batch.source.lengths) if batch.source else 0)
               for batch in replace(setup, ranks=ALONE).prepare(step))
