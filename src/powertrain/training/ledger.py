"""What a step really takes of memory: the largest sum of what torch's allocator has handed out and not got back.

On a CPU that is counted from torch's own record of every allocation, which its profiler keeps; the step takes longer while
it does, so one or two steps of a run are watched and no more. On CUDA the allocator keeps these figures anyway.
Memory that a library takes without torch's allocator is in neither.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from powertrain.models.kernels.quantised import QuantisedLinear
from powertrain.training.loop import State, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, load_when_needed

ALLOCATION = "memory_alloc"                  # what torch's profiler calls one; freeing is one of negative size


class MemoryLedger:
    """Watches what is allocated between `with MemoryLedger(device) as ledger:` and its end, by this thread.

    `peak_bytes`: the most that was there at once, over what stood at the start, plus `standing` bytes. On CUDA `standing`
    is by default what the allocator says stands at the start, and `reserved_bytes` is what it reserved; else both are 0.
    Not reentrant on a CPU, and not inside of torch's profiler: RuntimeError.
    """

    def __init__(self, device: torch.device, standing: int | None = None) -> None:
        self.device = device
        self.standing = standing
        self.peak_bytes = self.reserved_bytes = 0
        self._start = 0

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            standing = self._start if self.standing is None else self.standing
            self.peak_bytes = standing + torch.cuda.max_memory_allocated(self.device) - self._start
            self.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
            return
        # bytes, negative where they were freed, in order; freeing what stood at the start is not in it
        changes = [event.cpu_memory_usage() for thread in _disable_profiler_legacy() for event in thread
                   if str(event.kind()) == ALLOCATION]
        self.peak_bytes = max(accumulate(changes, initial=0)) + (self.standing or 0)


def step_ledger(setup: Setup, state: State) -> MemoryLedger:
    """Return a ledger for one optimizer step, with what stands between two steps."""
    return MemoryLedger(setup.device, None if setup.device.type == "cuda" else standing_bytes(setup.model, state.optimizer))


def measured_step_bytes(setup: Setup, state: State, max_grad_norm: float = 1.0) -> int:
    """Return the real peak of one optimizer step after the first, with weights, moments and all.

    It takes that step, and a first one where the optimizer has no state yet, so `state` moves on by one or two steps.
    """
    rate = state.optimizer.param_groups[0]["lr"]
    steps = train(replace(setup, loader=load_when_needed), state, Schedule("constant", rate, state.step + 2), max_grad_norm)
    if not state.optimizer.state:
        next(steps)
    with step_ledger(setup, state) as ledger:
        next(steps)
    return ledger.peak_bytes


def standing_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes held between two steps: weights and buffers, packed ones too, kept gradients, the optimizer's state."""
    kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in (*model.parameters(), *model.buffers(), *kept, *moments)}
    packed = sum(module.held_bytes for module in model.modules() if isinstance(module, QuantisedLinear))
    return sum(storages.values()) + packed


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
