"""A step that does not fit the memory is taken again in smaller passes: same examples, same batch, same update up to rounding.

What breaks off in a forward or backward pass leaves weights and optimizer as they were, so that clearing the gradients is
all it takes. In the middle of the optimizer's update it does not, and the run ends. With dropout the second try draws other
masks than the first would have: random numbers that the failed pass drew are spent.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from typing import Any

import torch

from powertrain import planner
from powertrain.run.prepare import Prepared
from powertrain.training.loop import State
from powertrain.training.setup import Setup

# how torch's allocators, oneDNN and C++ say on a CPU that there is no memory; on a GPU it is torch.OutOfMemoryError
SAID = ("can't allocate memory", "not enough memory", "bad_alloc", "bad allocation", "cannot allocate memory",
        "could not create a memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that an allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in SAID)


def said_by(error: BaseException) -> str:
    """The error's own words in one line, without the place in torch's sources."""
    return str(error).partition("\n")[0].rpartition("err == 0. ")[2].rstrip(". ") or type(error).__name__


class UpdateWatch:
    """Knows whether the optimizer is in the middle of an update, which cannot be repeated."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.updating = False
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self.updating = True

    def _end(self, *_: Any) -> None:
        self.updating = False


def clear_step(state: State) -> None:
    """Everything that an unfinished step has left behind, back to what it was before it."""
    state.optimizer.zero_grad(set_to_none=True)
    if state.scaler.is_enabled():
        with contextlib.suppress(AssertionError):        # nothing was unscaled yet
            state.scaler.update()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_smaller_passes(prepared: Prepared, setup: Setup, step: int) -> tuple[Prepared, Setup] | None:
    """The plan and the setup with the largest pass of `step` (from 0) about halved, at the same batch; None where it cannot be.

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
    """Slots of the largest pass of a step (from 0)."""
    return max(sum(batch.lengths) + (sum(batch.source.lengths) if batch.source else 0) for batch in setup.prepare(step))
