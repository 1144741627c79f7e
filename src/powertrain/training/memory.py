"""The memory of a step: what the step really takes, and how a run learns that memory has run out.

What a step takes is the largest sum of what torch's allocator has handed out and not got back. On a CPU that is counted from
torch's own record of every allocation, which its profiler keeps; the step takes longer while it does, so one or two steps of
a run are watched and no more. On CUDA the allocator keeps these figures anyway. Memory that a library takes without torch's
allocator is in neither. On MPS no peak is kept: what Metal has handed to the process counts, once torch's pool is emptied.

A forward or backward pass that runs out of memory leaves weights and optimizer as they were; an optimizer's update does not.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Self

import psutil
import torch
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from powertrain.models.kernels.quantised import QuantisedLinear
from powertrain.training.ranks import Ranks
from powertrain.training.sharded import lost_peer, own_part

ALLOCATION = "memory_alloc"                  # what torch's profiler calls one; freeing is one of negative size


class MemoryLedger:
    """Watches what is allocated between `with MemoryLedger(device) as ledger:` and its end, by this thread and gloo's.

    `peak_bytes`: the most that was there at once, over what stood at the start, plus `standing` bytes. On CUDA `standing`
    is by default what the allocator says stands at the start, and `reserved_bytes` is what it reserved; else both are 0.
    On MPS `standing` is by default what Metal had handed out; its figures are of whole heaps, and of graphs too.
    Tensors that gloo's thread is the last to let go of are not seen to be freed, so processes on CPUs may hold less than this.
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
        elif self.device.type == "mps":
            torch.mps.synchronize()
            torch.mps.empty_cache()
            self._start = torch.mps.driver_allocated_memory()
        else:
            _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
        return self

    def __exit__(self, *_: object) -> None:
        standing = self._start if self.standing is None else self.standing
        if self.device.type == "mps":
            torch.mps.synchronize()
            self.peak_bytes = standing + torch.mps.driver_allocated_memory() - self._start
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = standing + torch.cuda.max_memory_allocated(self.device) - self._start
            self.reserved_bytes = torch.cuda.max_memory_reserved(self.device)
            return
        # bytes, negative where they were freed; freeing what stood at the start is not in it
        events = [event for thread in _disable_profiler_legacy() for event in thread]
        events.sort(key=events[0].cpu_elapsed_us)        # gloo's threads allocate while this one waits for them
        changes = [event.cpu_memory_usage() for event in events if str(event.kind()) == ALLOCATION]
        self.peak_bytes = max(accumulate(changes, initial=0)) + standing


def step_ledger(device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer,
                others: Iterable[Tensor] = ()) -> MemoryLedger:
    """Return a ledger for one optimizer step, with what stands between two steps."""
    return MemoryLedger(device, None if device.type != "cpu" else standing_bytes(model, optimizer, others))


def standing_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, others: Iterable[Tensor] = ()) -> int:
    """Return the bytes held between two steps: weights and buffers, packed ones too, kept gradients, the optimizer's state.

    `others` are tensors that the objective holds.
    """
    kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    moments += getattr(optimizer, "averages", {}).values()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in map(own_part, (*model.parameters(), *model.buffers(), *kept, *moments, *others))}
    packed = sum(module.held_bytes for module in model.modules() if isinstance(module, QuantisedLinear))
    return sum(storages.values()) + packed


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: allocated on a CUDA GPU, handed out by Metal on MPS, else resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":                 # the resident memory of a process holds none of the GPU's
        return torch.mps.driver_allocated_memory()
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


# ------------------------------------------------------------------------------------------------ memory that runs out

# how torch's allocators, oneDNN and C++ say on a CPU that there is no memory; then how MPS, the CUDA or HIP runtime and driver,
# Triton and the libraries (cuBLAS, cuDNN) do. Only CUDA's caching allocator raises torch.OutOfMemoryError.
# Sources: pytorch#130112, pytorch#141909 (MPS), c10/cuda/driver_api.h and Triton's driver.c (driver), cudnn_graph.h.
SAID = ("can't allocate memory", "not enough memory", "bad_alloc", "bad allocation", "cannot allocate memory",
        "could not create a memory", "mps backend out of memory", "invalid buffer size", "error: out of memory",
        "triton error [cuda]: out of memory", "triton error [hip]: out of memory", "_status_alloc_failed", "_allocation_failed")


class PassTooLarge(MemoryError):
    """A pass ran out of memory, in this process or in another one of the run; `said` is the allocator's message."""

    def __init__(self, said: str):
        super().__init__(f"a pass ran out of memory ({said})")
        self.said = said


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that an allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in SAID)


def said_by(error: BaseException) -> str:
    """Return the error's message in one line, without the place in torch's sources."""
    if isinstance(error, PassTooLarge):
        return error.said
    return str(error).partition("\n")[0].rpartition("err == 0. ")[2].rstrip(". ") or type(error).__name__


@contextlib.contextmanager
def passes(ranks: Ranks) -> Iterator[None]:
    """Run this process's passes inside; where memory runs out in one process, raise PassTooLarge in all of them."""
    said = None
    try:
        yield
    except Exception as error:
        if ranks.lockstep or not is_out_of_memory(error):    # in lockstep the others wait for this very pass
            raise lost_peer(error) or error from None
        said = said_by(error)
    if (found := ranks.first(said)) is not None:
        raise PassTooLarge(found)
