"""A CUDA device without memory or arithmetic, on a build of torch for CPUs: see `FakeCuda`.

Tensors on the CPU are real. Those on `cuda:0` are torch's fake tensors: they have a shape, a dtype and a device, and no
numbers. torch refuses an operator over tensors of both devices, as on a real GPU. What autograd asks of a device is in
fake_cuda.cpp, which must be loaded before torch. All of this changes the whole process, so a process of its own uses it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

COPIES = ("aten::_to_copy", "aten::copy_")
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")


class HostSync(AssertionError):
    """The host waits for the device where the project promises that it does not."""


class NotRecordable(AssertionError):
    """A CUDA graph is being recorded, and this cannot be part of one."""


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's arguments; tree_leaves takes several times as long."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class FakeCuda(TorchDispatchMode):
    """Runs operators on fake tensors where one of them, or the result, is on the GPU.

    A host sync raises HostSync, but within `answering`. There a read has an answer that changes nothing: zero, or True.
    """

    counts = 1                               # reads are counted: each one is in the list of `answering`

    def __init__(self, *, capability: tuple[int, int], name: str, memory_bytes: int) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.answers = self.is_recording = False
        self.read: list[str] = []            # what the host has read, in order
        self.launched: list[str] = []        # Triton's kernels
        self.waited: list[str] = []          # calls that wait for the whole device
        self.capability, self.name, self.memory_bytes = capability, name, memory_bytes

    @contextlib.contextmanager
    def answering(self) -> Iterator[list[str]]:
        """Let the host read the device. Yield the list of what it reads."""
        self.answers, before, self.read = True, (self.answers, self.read), []
        try:
            yield self.read
        finally:
            self.answers, self.read = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in(args if not kwargs else (args, tuple(kwargs.values()))))
        given = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        to = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu")).type
        name = function._schema.name
        if not given and to != "cuda":
            return function(*args, **kwargs)
        if name in COPIES and (tensors[0].device.type if name == "aten::copy_" else to) == "cpu":
            return self._copied_to_the_host(name, args, kwargs)
        if name in READS and given:
            return self._answer(name, given[0])
        if name.startswith("aten::index") and any(tensor.dtype is torch.bool for tensor in given[1:]):
            self._answer(f"{name} by a mask", given[0])
        if self.is_recording and any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
            raise NotRecordable(f"{name} reads memory of the host")
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        with self.fake:
            return function(*args, **kwargs)

    def _as_fake(self, tensor: torch.Tensor) -> FakeTensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _answer(self, name: str, tensor: torch.Tensor) -> Any:
        if self.is_recording:
            raise NotRecordable(f"{name} makes the host wait")
        if not self.answers or name not in (*COPIES, "aten::_local_scalar_dense"):
            raise HostSync(f"{name} of a {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}")
        self.read.append(name)
        return True if tensor.dtype is torch.bool else torch.zeros((), dtype=tensor.dtype).item()

    def _copied_to_the_host(self, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Return zeros on the host. A copy into pinned memory need not be waited for."""
        if name == "aten::_to_copy":
            self._answer(name, args[0])
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        target, source = args[:2]
        if not (target.is_pinned() and (kwargs.get("non_blocking") or True in args[2:])):
            self._answer(name, source)
        zeros: torch.Tensor = target.zero_()
        return zeros


# ------------------------------------------------------------------------------------------------ torch believes in it


class Event:
    """Marks no place in a stream, and counts who waits for one."""

    waits: ClassVar[list[Event]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.is_recorded = False

    def record(self, *args: Any) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded, "nothing is waited for"
        self.waits.append(self)

    def elapsed_time(self, other: Event) -> float:
        assert self.is_recorded, "it marks no time"
        assert other.is_recorded, "it marks no time"
        return 1000.0                        # ms


class Stream:
    """A stream on which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def record_event(self, *args: Any) -> Event:
        return Event()


def start(*, capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H100 80GB HBM3",
          memory_bytes: int = 80 << 30) -> FakeCuda:
    """Let this process have a GPU, and return it; it is there within `with`."""
    assert not torch.backends.cuda.is_built(), "this build of torch has CUDA; fake tensors are for builds without it"
    assert torch._C._get_accelerator().type == "cuda", "the library of fake_cuda.cpp was not loaded before torch"
    device = FakeCuda(capability=capability, name=name, memory_bytes=memory_bytes)
    nothing: Callable[..., Any] = lambda *args, **kwargs: None      # noqa: E731
    answers = {
        "is_available": True, "is_bf16_supported": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "max_memory_allocated": 0, "memory_allocated": 0, "max_memory_reserved": 0, "is_current_stream_capturing": False}
    for asked, answer in answers.items():
        setattr(torch.cuda, asked, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.get_device_capability = lambda *args: device.capability
    torch.cuda.get_device_name = lambda *args: device.name
    torch.cuda.mem_get_info = lambda *args: (device.memory_bytes - (1 << 30), device.memory_bytes)
    torch.cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    for ignored in ("_lazy_init", "set_rng_state", "manual_seed_all", "manual_seed", "reset_peak_memory_stats", "set_device"):
        setattr(torch.cuda, ignored, nothing)
    torch.cuda.Event, torch.cuda.Stream, torch.cuda.current_stream = Event, Stream, Stream  # type: ignore[misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = nothing
    halves, asks = (torch.bfloat16, torch.float16), torch.backends.cuda
    asks.can_use_flash_attention = lambda asked, debug=False: (
        device.capability >= (8, 0) and asked.query.dtype in halves and asked.attn_mask is None)
    asks.can_use_efficient_attention = lambda asked, debug=False: asked.query.shape[1] == asked.key.shape[1]
    torch.cuda.synchronize = lambda *args: device.waited.append("synchronize")
    torch._C._cuda_getCurrentRawStream = lambda place: 0
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch._C._set_only_lift_cpu_tensors(True)            # torch.tensor(..., device="cuda") copies by an operator
    torch.__future__.set_overwrite_module_params_on_conversion(True)         # a parameter cannot become a fake one in place
    torch.cuda.CUDAGraph = lambda: SimpleNamespace(replay=nothing)
    torch.cuda.graph = lambda graph, stream: _recording(device)
    FakeTensor.data_ptr = lambda tensor: id(tensor.untyped_storage())
    if "triton" in sys.modules or _has_triton():
        _stub_triton(device)
    return device


@contextlib.contextmanager
def _recording(device: FakeCuda) -> Iterator[None]:
    device.is_recording = True
    try:
        yield
    finally:
        device.is_recording = False


def _has_triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None


def _stub_triton(device: FakeCuda) -> None:
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        apart = [tensor.device for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)
                 and tensor.device.type != "cuda"]
        assert not apart, f"{kernel.__name__}: Pointer argument cannot be accessed from Triton (cpu tensor?)"
        device.launched.append(kernel.__name__)

    JITFunction.run = run
