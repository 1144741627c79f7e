"""The tensors in the files of a checkpoint, of which each file may hold some rows or columns.

The files are safetensors files, read by its library. They are written here: each piece is hashed as it is written, and goes
past the page cache where the file system allows that. Safetensors' own writer (0.8), hashing the file afterwards and a kernel
thread that writes the page cache back would together take several times the processor time, and training needs the cores.
"""

import errno
import hashlib
import json
import mmap
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

WRITTEN_BYTES = 4 << 20                      # at a time: large for a disk, and what was just copied is still in the cache
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Held:
    """A tensor to be written: contiguous pieces of host memory that hold its values one after the other."""

    dtype: torch.dtype
    shape: torch.Size
    pieces: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def as_safetensors(tensors: Mapping[str, Held], metadata: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file with these tensors, those of wide types first.

    Source: the format's description, https://huggingface.co/docs/safetensors: length and JSON of the header, then the values.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        first, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in (piece for name in names for piece in tensors[name].pieces):
        yield piece.cpu().reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file and return when the disk has it, with its entry in the manifest. Raises OSError."""
    digest, size_bytes = hashlib.sha256(), 0
    file = _Unbuffered(path)
    try:
        for piece in _pieces(parts):
            digest.update(piece)
            file.write(piece)
            size_bytes += len(piece)
        os.fsync(file.descriptor)
    finally:
        os.close(file.descriptor)
    return {"bytes": size_bytes, "sha256": digest.hexdigest()}


def _pieces(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield the content in pieces of WRITTEN_BYTES, the last one shorter: each in the same memory, which begins at a page."""
    buffer, filled = memoryview(mmap.mmap(-1, WRITTEN_BYTES)), 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            taken = rest[:WRITTEN_BYTES - filled]
            buffer[filled:filled + len(taken)] = taken
            filled, rest = filled + len(taken), rest[len(taken):]
            if filled == WRITTEN_BYTES:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


class _Unbuffered:
    """A new file, written past the page cache (O_DIRECT) until that is refused: at an end within a block, or from the start."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)         # of Windows; see event_log.py
        self._direct = getattr(os, "O_DIRECT", 0)
        try:
            self.descriptor = os.open(path, flags | self._direct, 0o666)
        except OSError as error:
            if not (self._direct and error.errno == errno.EINVAL):
                raise
            self._direct = 0
            self.descriptor = os.open(path, flags, 0o666)

    def write(self, piece: memoryview) -> None:
        """Write all of it. Raises OSError."""
        while piece:
            try:
                written = os.write(self.descriptor, piece)
            except OSError as error:
                if not (self._direct and error.errno == errno.EINVAL):
                    raise
                self._go_buffered()
                continue
            piece = piece[written:]

    def _go_buffered(self) -> None:
        import fcntl  # there is none where there is no O_DIRECT

        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~self._direct)
        self._direct = 0


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
