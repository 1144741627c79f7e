"""Pinned memory of the host, which a GPU reads and writes while both compute, without torch's rounding up."""

from collections.abc import Callable

import torch
from torch import Tensor

SLAB_BYTES, ALIGNED_BYTES = 2**30, 512


def pinned(nbytes: int) -> Tensor:
    """Return so many bytes of pinned memory, (N,) uint8. torch rounds them up to a power of two."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Slabs:
    """Memory of the host in pieces of any size, cut from slabs of a power of two bytes, and never given back.

    torch rounds each pinned tensor up to a power of two: one of 129 MiB would take 256. Larger ones than a slab still do.
    """

    def __init__(self, allocate: Callable[[int], Tensor], slab_bytes: int = SLAB_BYTES) -> None:
        """`allocate` returns so many bytes, (N,) uint8."""
        self._allocate, self.slab_bytes, self.slabs = allocate, slab_bytes, 0
        self._rest = torch.empty(0, dtype=torch.uint8)

    def cut(self, numbers: int, dtype: torch.dtype) -> Tensor:
        """Return room for so many numbers, (numbers,)."""
        nbytes = numbers * dtype.itemsize
        if nbytes > self.slab_bytes:
            return self._allocate(nbytes).view(dtype)
        taken = -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        if taken > len(self._rest):
            self._rest = self._allocate(self.slab_bytes)
        piece, self._rest = self._rest[:nbytes], self._rest[taken:]
        return piece.view(dtype)

    def copy(self, tensor: Tensor) -> list[Tensor]:
        """Return a tensor's bytes in pieces, each (N,) uint8, which fill the slabs without gaps. No host waits for a GPU."""
        rest, pieces = tensor.contiguous().reshape(-1).view(torch.uint8), []
        while len(rest):
            if not len(self._rest):
                self._rest, self.slabs = self._allocate(self.slab_bytes), self.slabs + 1
            room, self._rest = self._rest[:len(rest)], self._rest[len(rest):]
            part, rest = rest[:len(room)], rest[len(room):]
            pieces.append(room.copy_(part, non_blocking=True))
        return pieces
