"""Tokenising one stretch of a file: the work in words that another process can be told, and that process's main function.

A stretch begins and ends where a line does, and knows the number of its first line, so that its rows have the origins that
they have when the file is read as a whole. Only JSONL is cut: in CSV a line end may be part of a field.

The further process reads the work in the first line of its standard input and a stretch in each line behind it, and answers
each with a line end. It ends with its input, so that it cannot outlive the process that started it; an error ends it, and the
other process tokenises its stretch again.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from powertrain.data.examples.encoding import Encoder, Limit, TrainOn, make_encoder
from powertrain.data.examples.part import PartWriter, write_rows
from powertrain.data.examples.templates import ChatTemplate
from powertrain.data.examples.tokenizer import ExampleTokenizer, open_example_tokenizer
from powertrain.data.reading import readable
from powertrain.data.rows.files import json_lines
from powertrain.data.rows.folders import LINES, data_suffix
from powertrain.data.rows.reading import local_files
from powertrain.data.rows.row import Rejected, Row
from powertrain.data.rows.schemas import Schema
from powertrain.records import WrongUse

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


# ------------------------------------------------------------------------------------------------ the work

TOLD = "told.json"                           # beside the files of a stretch, written last


@dataclass(frozen=True, eq=False)
class Work:
    schema: Schema
    tokenizer: ExampleTokenizer
    template: ChatTemplate | None
    train_on: TrainOn
    limit: Limit

    @cached_property
    def encoder(self) -> Encoder[Any]:
        return make_encoder(self.schema.kind, self.tokenizer, self.template, self.train_on, self.limit)

    def write(self, folder: Path, stretch: Stretch) -> None:
        """The rows of `stretch` as the files of a part in `folder`, for `PartWriter.append`."""
        folder.mkdir()
        with PartWriter(folder, self.tokenizer.vocabulary, self.schema.kind) as writer:
            write_rows(writer, stretch.rows(), self.schema, self.encoder)
        (folder / TOLD).write_text(json.dumps(writer.told()), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        return {"schema": [self.schema.name, self.schema.kind, dict(self.schema.columns)],
                "tokenizer": [str(self.tokenizer.folder), self.tokenizer.end, self.tokenizer.digest],
                "template": None if self.template is None else asdict(self.template),
                "train_on": self.train_on, "limit": asdict(self.limit)}


def work_from(told: Mapping[str, Any]) -> Work:
    """What `to_json` told. Raises WrongUse if the tokenizer's folder has changed since."""
    folder, end, digest = told["tokenizer"]
    tokenizer = open_example_tokenizer(Path(folder), end)
    if tokenizer.digest != digest:
        raise WrongUse(f"the tokenizer in {folder} changed while rows were tokenised with it; start again")
    template = None if told["template"] is None else \
        ChatTemplate(**{**told["template"], "special": tuple(told["template"]["special"])})
    return Work(Schema(*told["schema"]), tokenizer, template, told["train_on"], Limit(**told["limit"]))


# ------------------------------------------------------------------------------------------------ a further process

ANSWER = b"\n"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # who started this is interrupted too, and ends it
    answers, sys.stdout = os.dup(sys.stdout.fileno()), sys.stderr        # nothing else may be taken for an answer
    work = work_from(json.loads(sys.stdin.readline()))
    gc.freeze()                              # what is here stays to the end
    for line in sys.stdin:
        told = json.loads(line)
        work.write(Path(told["folder"]), Stretch(Path(told["path"]), told["start"], told["size_bytes"], told["line"]))
        os.write(answers, ANSWER)
