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
        self._allocate, self.slab_bytes = allocate, slab_bytes
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
