"""How attention in tiles cuts a pass up, in numbers: what kernels/bmm.py does with the same lengths. A test compares them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

TILE_BYTES = 3 << 19
TILE_ROWS = {4: 64, 2: 128}
FILL_TO = {4: 8, 2: 32}


@dataclass(frozen=True)
class Tile:
    rows: int
    keys: int


@dataclass(frozen=True)
class Chunk:
    """Documents that are computed together, each filled up to `length`."""

    documents: int
    length: int
    copies: bool                             # they do not lie end to end, or are filled up
    tiles: tuple[Tile, ...]

    @property
    def weights(self) -> int:
        """Of one head, over all tiles."""
        return self.documents * sum(tile.rows * tile.keys for tile in self.tiles)


@lru_cache(maxsize=256)
def chunks_of(lengths: tuple[int, ...], heads: int, window: int | None, item: int) -> tuple[Chunk, ...]:
    """The chunks of a pass over documents of these lengths, in the order in which they are computed."""
    starts = tuple(itertools.accumulate(lengths, initial=0))
    step = FILL_TO[item] if len(set(lengths)) > 1 else 1
    ordered = sorted((document for document, length in enumerate(lengths) if length), key=lambda d: lengths[d])
    found = []
    for steps, group in itertools.groupby(ordered, key=lambda document: -(-lengths[document] // step)):
        documents, length = list(group), steps * step
        rows = min(length, TILE_ROWS[item])
        together = max(1, TILE_BYTES // (heads * rows * length * item))
        tiles = tuple(_tiles(length, rows, window))
        for first in range(0, len(documents), together):
            part = documents[first:first + together]
            ends = [starts[part[0]] + place * length for place in range(len(part))]
            whole = [starts[d] for d in part] == ends and min(lengths[d] for d in part) == length
            found.append(Chunk(len(part), length, not whole, tiles))
    return tuple(found)


def _tiles(length: int, rows: int, window: int | None) -> list[Tile]:
    found = []
    for first in range(0, length, rows):
        last = min(first + rows, length)
        found.append(Tile(last - first, last - (0 if window is None else max(0, first - window + 1))))
    return found
