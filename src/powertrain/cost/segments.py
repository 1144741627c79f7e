"""The pieces of memory that torch's CUDA allocator reserves, and how it deals its blocks out of them.

Blocks are multiples of 512 bytes. Those of up to 1 MiB come out of segments of 2 MiB, those below 10 MiB out of segments of
20 MiB, and larger ones have a segment of their own, a multiple of 2 MiB. A block is cut from the smallest free piece that
holds it, in a segment of its pool; what is given back joins its free neighbours. No segment is ever returned.
Source: torch/c10/cuda/CUDACachingAllocator.cpp, without `expandable_segments` and `max_split_size_mb`.
"""

from __future__ import annotations

import bisect

ROUNDING = 512
SMALL = 1 << 20                              # up to here a block comes from the pool of small ones
SMALL_SEGMENT, MIDDLE_SEGMENT, LARGE_STEP = 2 << 20, 20 << 20, 2 << 20
MIDDLE = 10 << 20                            # from here on a block has a segment of its own


class Piece:
    """A free or a dealt part of a segment."""

    __slots__ = ("after", "before", "is_free", "is_small", "nbytes", "number")

    def __init__(self, number: int, nbytes: int, is_small: bool) -> None:
        self.number, self.nbytes, self.is_small, self.is_free = number, nbytes, is_small, False
        self.before: Piece | None = None
        self.after: Piece | None = None


class Segments:
    """`reserved` only grows, so it is its own peak."""

    def __init__(self) -> None:
        self.reserved = 0
        self.count = 0
        self.free: dict[bool, list[tuple[int, int, Piece]]] = {True: [], False: []}    # of the small pool, of the other

    def take(self, nbytes: int) -> Piece:
        nbytes = max(ROUNDING, -(-nbytes // ROUNDING) * ROUNDING)
        is_small = nbytes <= SMALL
        pool = self.free[is_small]
        place = bisect.bisect_left(pool, (nbytes, 0))
        piece = pool.pop(place)[2] if place < len(pool) else self._reserve(nbytes, is_small)
        piece.is_free = False
        rest = piece.nbytes - nbytes
        if rest >= ROUNDING if is_small else rest > SMALL:
            self._cut(piece, nbytes)
        return piece

    def give(self, piece: Piece) -> None:
        for other in (piece.before, piece.after):
            if other is not None and other.is_free:
                pool = self.free[piece.is_small]
                del pool[bisect.bisect_left(pool, (other.nbytes, other.number))]
                piece.nbytes += other.nbytes
                if other is piece.before:
                    piece.before = other.before
                    if piece.before is not None:
                        piece.before.after = piece
                else:
                    piece.after = other.after
                    if piece.after is not None:
                        piece.after.before = piece
        self._offer(piece)

    def _reserve(self, nbytes: int, is_small: bool) -> Piece:
        large = MIDDLE_SEGMENT if nbytes < MIDDLE else -(-nbytes // LARGE_STEP) * LARGE_STEP
        size = SMALL_SEGMENT if is_small else large
        self.reserved += size
        return self._piece(size, is_small)

    def _piece(self, nbytes: int, is_small: bool) -> Piece:
        self.count += 1
        return Piece(self.count, nbytes, is_small)

    def _cut(self, piece: Piece, nbytes: int) -> None:
        rest = self._piece(piece.nbytes - nbytes, piece.is_small)
        rest.before, rest.after = piece, piece.after
        if rest.after is not None:
            rest.after.before = rest
        piece.nbytes, piece.after = nbytes, rest
        self._offer(rest)

    def _offer(self, piece: Piece) -> None:
        piece.is_free = True
        bisect.insort(self.free[piece.is_small], (piece.nbytes, piece.number, piece))
