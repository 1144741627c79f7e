"""The tokenised examples of one source, on disk, read as they are asked for.

    <cache>/examples/<key>/  examples.bin    one RECORD for each example
                             tokens.bin      their ids end to end, little-endian uint16 or uint32
                             trained.bin     int32 pairs: ranges of an example's ids that are targets
                             sources.bin     what an encoder reads, end to end (pairs only)
                             segments.bin    uint8 for each id (spans only)
                             meta.json       the counts, the first rows of each problem, where rows come from

All are memory-mapped: what a process holds does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.data.example import Example
from powertrain.data.publishing import read_meta
from powertrain.data.tokenizers import token_dtype
from powertrain.records import IGNORE

# the *_end columns say where the example ends in the other files; it starts where the one before it ends
RECORD = np.dtype([("end", "<i8"), ("trained_end", "<i8"), ("source_end", "<i8"), ("trained_tokens", "<i4"), ("row", "<i8"),
                   ("prompt", "<u8"), ("digest", "<u8"), ("place", "<i4"), ("number", "<i8"), ("answer", "<i4", (2,))])
PROBLEMS_KEPT = 20                           # of each kind, with their origin: enough to find out what is wrong


@dataclass(frozen=True)
class Problem:
    kind: str                                # "bad", "untrained", "cut", "dropped", "boundary", "only_last"
    origin: str
    reason: str


@dataclass(frozen=True, eq=False)
class Part:
    folder: Path
    kind: str                                # "conversation", "pair", "span" or "text"
    records: npt.NDArray[Any]                # (N,) RECORD
    tokens: npt.NDArray[Any]
    trained: npt.NDArray[np.int32]           # (ranges, 2)
    sources: npt.NDArray[Any]
    segments: npt.NDArray[np.uint8]
    counts: Mapping[str, int]
    problems: tuple[Problem, ...]
    places: tuple[str, ...]                  # what origins begin with
    schema: str
    said: str                                # how the rows were read

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def source_lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.records["source_end"], prepend=0)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(N,) tokens that the model reads of each example, an encoder's included."""
        ids = np.diff(self.records["end"], prepend=0)
        return (ids - 1 if self.kind in ("conversation", "text") else ids) + self.source_lengths

    def origin(self, index: int) -> str:
        record = self.records[index]
        number = int(record["number"])
        return self.places[int(record["place"])] + (str(number) if number >= 0 else "")

    def ids(self, index: int) -> npt.NDArray[np.int64]:
        return self.tokens[self._slice("end", index)].astype(np.int64)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """The ranges of `ids` that are targets."""
        return [(int(start), int(stop)) for start, stop in self.trained[self._slice("trained_end", index)]]

    def source(self, index: int) -> npt.NDArray[np.int64]:
        return self.sources[self._slice("source_end", index)].astype(np.int64)

    def example(self, index: int, decoder_start: int | None) -> Example:
        ids = self.ids(index)
        if self.kind == "span":
            return Example(ids, self.records[index]["answer"].astype(np.int64),
                           segments=self.segments[self._slice("end", index)].astype(np.int64))
        if self.kind == "pair":
            assert decoder_start is not None
            return Example(np.concatenate([[decoder_start], ids[:-1]]), ids, source=self.source(index))
        targets = np.full(len(ids) - 1, IGNORE, dtype=np.int64)
        for start, stop in self.ranges(index):
            targets[start - 1:stop - 1] = ids[start:stop]
        return Example(ids[:-1], targets)

    def _slice(self, column: str, index: int) -> slice:
        ends = self.records[column]
        return slice(int(ends[index - 1]) if index else 0, int(ends[index]))


def open_part(folder: Path) -> Part:
    meta = read_meta(folder)
    dtype = token_dtype(meta["vocabulary"])
    return Part(
        folder, meta["kind"], _mapped(folder / "examples.bin", RECORD), _mapped(folder / "tokens.bin", dtype),
        _mapped(folder / "trained.bin", np.dtype("<i4")).reshape(-1, 2), _mapped(folder / "sources.bin", dtype),
        _mapped(folder / "segments.bin", np.dtype("u1")), meta["counts"],
        tuple(Problem(*problem) for problem in meta["problems"]), tuple(meta["places"]), meta["schema"], meta["said"])


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # an empty file cannot be mapped; asarray, because a memmap's own slices are slow to make
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)
