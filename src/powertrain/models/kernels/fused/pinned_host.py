"""The host's memory beside a CUDA device: copies run on a stream of their own while the device computes.

Going out, a tensor is copied to pinned memory once the computing stream has made it; its device memory is not handed out
again before that is done. Coming back, the tensors that are needed next are copied while the current block computes: they
come back in the reverse of the order in which they went, as backward passes do.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powertrain.models.kernels.fused.saving import AHEAD


@dataclass(eq=False)
class Stay:
    """One tensor that is out."""

    pinned: Tensor                           # on the host
    device: torch.device
    moved: Any                               # event: the last copy of it is done
    back: Tensor | None = None               # on the device, once its way back has begun


class PinnedHost:
    """Pinned buffers, kept for the next step once they were used, and the stream that copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out: list[weakref.ref[Stay]] = []      # of a pass that failed, nothing stays
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def put(self, tensor: Tensor) -> Stay:
        """Begins to copy a contiguous row of numbers; see saving.Host."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            pinned = self._buffer(tensor)
            pinned.copy_(tensor, non_blocking=True)
            moved = self._stream.record_event()
        tensor.record_stream(self._stream)   # its memory is about to be given back, and this copy still reads it
        stay = Stay(pinned, tensor.device, moved)
        self._out = [other for other in self._out if other() is not None] + [weakref.ref(stay)]
        return stay

    def fetch(self, stay: Stay) -> Tensor:
        """The numbers; the next ones are on their way."""
        self._begin(stay)
        self._out.remove(weakref.ref(stay))
        for reference in self._out[:-AHEAD - 1:-1]:
            if (following := reference()) is not None:
                self._begin(following)
        computing = torch.cuda.current_stream(stay.device)
        computing.wait_event(stay.moved)
        assert stay.back is not None
        stay.back.record_stream(computing)
        self._free[stay.pinned.numel(), stay.pinned.dtype].append(stay.pinned)
        back, stay.back = stay.back, None
        return back

    def _begin(self, stay: Stay) -> None:
        if stay.back is None:
            with torch.cuda.stream(self._stream):
                stay.back = stay.pinned.to(stay.device, non_blocking=True)
                stay.moved = self._stream.record_event()

    def _buffer(self, tensor: Tensor) -> Tensor:
        """One that a tensor of this size has come back from, or a new one."""
        free = self._free[tensor.numel(), tensor.dtype]
        if not free:
            return torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        return free.pop()                    # the copy out of it is older on the same stream than the one into it
