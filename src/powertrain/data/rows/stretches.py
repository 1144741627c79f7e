"""Files of lines cut into stretches that can be read by themselves, in any order and in several processes.

A stretch begins and ends where a line does, and knows the number of its first line, so that its rows have the origins that
they have when the file is read as a whole. Only JSONL is cut: in CSV a line end may be part of a field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from powertrain.data.rows.files import json_lines, readable
from powertrain.data.rows.folders import LINES, data_suffix
from powertrain.data.rows.reading import local_files
from powertrain.data.rows.row import Rejected, Row

PIECE_BYTES = 1 << 16                        # read at a time to count lines


@dataclass(frozen=True)
class Stretch:
    path: Path
    start: int                               # in bytes
    size_bytes: int
    line: int                                # the number of its first one, from 1

    def rows(self) -> Iterator[Row | Rejected]:
        return json_lines(self.path, self.start, self.line, self.size_bytes)


def files_of_lines(source: str, split: str | None) -> list[Path]:
    """The files of a source if all of them can be cut, else none."""
    files = local_files(source, split) or []
    return files if all(data_suffix(file) in LINES for file in files) else []


def stretches(files: Sequence[Path], size_bytes: int) -> Iterator[Stretch]:
    """All lines of `files` in order, about `size_bytes` at a time. One piece is held meanwhile, however long a line is."""
    for path in files:
        with readable(path), path.open("rb") as file:
            start, line = 0, 1
            while True:
                lines = _pass(file, size_bytes)
                stop = file.tell()
                if stop == start:
                    break
                yield Stretch(path, start, stop - start, line)
                start, line = stop, line + lines


def _pass(file: IO[bytes], size_bytes: int) -> int:
    """Goes on by `size_bytes` and from there to a line's end; returns how many line ends that were."""
    lines, piece = 0, b""
    while size_bytes > 0 and (piece := file.read(min(PIECE_BYTES, size_bytes))):
        lines += piece.count(b"\n")
        size_bytes -= len(piece)
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(PIECE_BYTES)
        lines += piece.endswith(b"\n")
    return lines
