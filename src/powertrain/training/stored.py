"""The tensors in the files of a checkpoint, of which each file may hold some rows or columns.

The files are safetensors files, read by its library. They are written here: each piece is hashed as it is written, which takes
half of the processor time of safetensors' own writer (0.8) and of reading the file again, and training has the other half.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from powertrain.records.checkpoints import places_in
from powertrain.training.sharded import Cut

WRITTEN_BYTES = 1 << 20                      # at a time: what was just hashed is still in the processor's cache
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def as_safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file with these contiguous tensors, those of wide types first.

    Source: the format's description, https://huggingface.co/docs/safetensors: length and JSON of the header, then the values.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        first, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file and return when the disk has it, with its entry in the manifest. Raises OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for part in parts:
            for first in range(0, len(part), WRITTEN_BYTES):
                piece = memoryview(part)[first:first + WRITTEN_BYTES]
                file.write(piece)
                digest.update(piece)
            size_bytes += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size_bytes, "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class Piece:
    """A tensor of a file that holds some rows (dimension 0) or columns (1) of a tensor, from `first` on."""

    file: Any                                # open
    key: str
    dimension: int = 0
    first: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.key).get_shape())

    def within(self, dimension: int, first: int, end: int) -> Tensor:
        """Return what the piece has of these rows or columns of the whole tensor; it may be empty."""
        begin = self.first if dimension == self.dimension else 0
        here = slice(max(0, first - begin), max(0, min(end - begin, self.shape[dimension])))
        found: Tensor = self.file.get_slice(self.key)[(slice(None),) * dimension + (here,)]
        return found


class Stored:
    """The tensors of one kind in a checkpoint, of which each file may hold some rows or columns."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Open the files. Raises SafetensorError, ValueError and what else a damaged one leads to."""
        self.pieces: dict[str, list[Piece]] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            for key, (name, dimension, first) in places_in(opened).items():
                self.pieces.setdefault(name, []).append(Piece(opened, key, dimension, first))
        for pieces in self.pieces.values():
            pieces.sort(key=lambda piece: piece.first)

    def shape(self, name: str) -> tuple[int, ...]:
        pieces = self.pieces[name]
        along, shape = pieces[0].dimension, list(pieces[0].shape)
        if shape:
            shape[along] = sum(piece.shape[along] for piece in pieces)
        return tuple(shape)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Return this part of a tensor; without a cut, all of it."""
        if not self.shape(name):
            whole: Tensor = self.pieces[name][0].file.get_tensor(self.pieces[name][0].key)
            return whole
        cut = cut or Cut(0, ((0, self.shape(name)[0]),))
        along = self.pieces[name][0].dimension
        return torch.cat([torch.cat([piece.within(cut.dimension, first, end) for piece in self.pieces[name]], along)
                          for first, end in cut.ranges], cut.dimension)
