"""How one source becomes a part of the example store: what its rows mean, what decides its content, and the build.

A digest says whether a source is still what it was. Files up to 64 MiB are read whole. Of larger ones the length, the time of
the last change and samples from beginning to end are taken, so that opening a 2 GB store takes no longer than opening a small
one; a copy with a new time counts as changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from powertrain.data.documents import CORPORA
from powertrain.data.examples.encoding import Limit, TrainOn, make_encoder
from powertrain.data.examples.part import Part, open_part, write_part
from powertrain.data.examples.sharing import STRETCH_BYTES, further_processes, write_together
from powertrain.data.examples.templates import ChatTemplate
from powertrain.data.examples.tokenizer import ExampleTokenizer
from powertrain.data.examples.work import Work, files_of_lines, stretches
from powertrain.data.publishing import is_whole, publish
from powertrain.data.reading import named_files
from powertrain.data.rows.folders import data_suffix, folder_files
from powertrain.data.rows.reading import ROW_SETS, read_rows
from powertrain.data.rows.row import Row
from powertrain.data.rows.schemas import Schema, find_schema
from powertrain.records import WrongUse

READ_WHOLE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
PIECE_BYTES = 1 << 20


def digest_source(source: str, *, cache: Path, split: str | None, text_field: str, most: int | None) -> str:
    """sha256 (hex) of what `read_rows` would read. A source that is no file is read row by row."""
    digest = hashlib.sha256()
    path = Path(source).expanduser()
    if source in CORPORA or source in ROW_SETS or (not path.exists() and _is_no_path(path)):
        for row in read_rows(source, cache=cache, split=split, text_field=text_field, most=most):
            digest.update(repr(row).encode(errors="surrogatepass"))
    else:
        for file in _source_files(path, source, split):
            digest.update(f"{file}\0{digest_file(file)}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's content, or of its length, time and samples if it is large."""
    digest = hashlib.sha256()
    try:
        stat = path.stat()
        with path.open("rb") as file:
            if stat.st_size <= READ_WHOLE_BYTES:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                return digest.hexdigest()
            digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
            for sample in range(SAMPLES):
                file.seek((stat.st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return digest.hexdigest()


def _is_no_path(path: Path) -> bool:
    return data_suffix(path) is None and not any(character in str(path) for character in "*?[")


def _source_files(path: Path, source: str, split: str | None) -> Sequence[Path]:
    return folder_files(path, split) if path.is_dir() else named_files(source)


# ------------------------------------------------------------------------------------------------ parts

FORMAT = 2                                   # of a part, and of all that decides its content
ROWS_LOOKED_AT = 64                          # to find out what they mean

Say = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """How rows are read, whatever the source."""

    format: str | None
    columns: Mapping[str, str]
    split: str | None
    text_field: str
    max_examples: int | None
    task: str
    cache: Path

    def look(self, source: str) -> tuple[Schema, str, bool]:
        """How its rows are to be read, the sentence that says so, and whether they are texts that need no template."""
        first = read_rows(source, cache=self.cache, split=self.split, text_field=self.text_field, most=ROWS_LOOKED_AT)
        rows = [row for row in first if isinstance(row, Row)]
        schema, said = find_schema(rows, name=self.format, columns=self.columns, task=self.task)
        texts = schema.name == "prompt_completion" and all(isinstance(row.fields.get(theirs), str | None)
                                                           for row in rows for theirs in schema.columns.values())
        return schema, f"{source}: {said}", texts

    def key(self, source: str, schema: Schema) -> dict[str, Any]:
        digest = digest_source(source, cache=self.cache, split=self.split, text_field=self.text_field, most=self.max_examples)
        return {"source": source, "digest": digest, "schema": [schema.name, schema.kind, dict(schema.columns)],
                "split": self.split, "text_field": self.text_field, "max_examples": self.max_examples}


@dataclass(frozen=True)
class Making:
    """How rows become examples, whatever the source."""

    reading: Reading
    tokenizer: ExampleTokenizer
    tokenizer_folder: Path                   # where it was opened, for other processes to do the same
    template: ChatTemplate | None
    train_on: TrainOn
    limit: Limit
    say: Say

    def part(self, source: str, schema: Schema, said: str) -> Part:
        key = {
            "format": FORMAT, "rows": self.reading.key(source, schema),
            "tokenizer": [self.tokenizer.digest, self.tokenizer.end, self.tokenizer.before],
            "template": self.template and self.template.text, "train_on": self.train_on,
            "limit": [self.limit.max_length, self.limit.drop],
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode(errors="surrogatepass")).hexdigest()[:32]
        folder = self.reading.cache / "examples" / name
        if not is_whole(folder):
            self.say(f"tokenising {source}")
            publish(folder, partial(self._build, source, schema, said))
        return open_part(folder)

    def _build(self, source: str, schema: Schema, said: str, folder: Path) -> dict[str, Any]:
        files = files_of_lines(source, self.reading.split) if self.reading.max_examples is None else []
        further = further_processes(files)
        if further:
            work = Work(schema, self.tokenizer_folder, self.tokenizer, self.template, self.train_on, self.limit)
            return write_together(folder, source, stretches(files, STRETCH_BYTES), work, said, further, self.say)
        rows = read_rows(source, cache=self.reading.cache, split=self.reading.split, text_field=self.reading.text_field,
                         most=self.reading.max_examples)
        encoder = make_encoder(schema.kind, self.tokenizer, self.template, self.train_on, self.limit)
        return write_part(folder, source, rows, schema, said, encoder, self.tokenizer.vocabulary, self.say)
