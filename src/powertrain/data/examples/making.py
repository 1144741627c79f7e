"""How one source becomes a part of the example store: what its rows mean, what decides its content, and the build.

A digest says whether a source is still what it was. Files up to 64 MiB are read whole. Of larger ones the length, the time of
the last change and samples from beginning to end are taken, so that opening a 2 GB store takes no longer than opening a small
one; a copy with a new time counts as changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from powertrain.data.examples.part import Part, PartWriter, Progress, Say, open_part, write_rows
from powertrain.data.examples.sharing import STRETCH_BYTES, further_processes, write_together
from powertrain.data.examples.work import Work, files_of_lines, stretches
from powertrain.data.publishing import is_whole, publish
from powertrain.data.reading import readable
from powertrain.data.rows.reading import local_files, read_rows
from powertrain.data.rows.row import Rejected, Row
from powertrain.data.rows.schemas import Schema, find_schema

READ_WHOLE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16


def digest_file(path: Path) -> str:
    """Return the sha256 (hex) of a file's content, or of its length, time and samples if it is large."""
    with readable(path), path.open("rb") as file:
        stat = path.stat()
        if stat.st_size <= READ_WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for sample in range(SAMPLES):
            file.seek((stat.st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ parts

FORMAT = 2                                   # of a part, and of all that decides its content
ROWS_LOOKED_AT = 64                          # to find out what they mean


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

    def rows(self, source: str, most: int | None) -> Iterator[Row | Rejected]:
        return read_rows(source, cache=self.cache, split=self.split, text_field=self.text_field, most=most)

    def look(self, source: str) -> tuple[Schema, str, bool]:
        """How its rows are to be read, the sentence that says so, and whether they are texts that need no template."""
        rows = [row for row in self.rows(source, ROWS_LOOKED_AT) if isinstance(row, Row)]
        schema, said = find_schema(rows, name=self.format, columns=self.columns, task=self.task)
        texts = schema.name == "prompt_completion" and all(isinstance(row.fields.get(theirs), str | None)
                                                           for row in rows for theirs in schema.columns.values())
        return schema, f"{source}: {said}", texts

    def digest(self, source: str) -> str:
        """Return the sha256 (hex) of the content that `rows` would read. A source that is no file is read row by row."""
        digest = hashlib.sha256()
        files = local_files(source, self.split)
        if files is None:
            for row in self.rows(source, self.max_examples):
                digest.update(repr(row).encode(errors="surrogatepass"))
        for file in files or ():
            digest.update(f"{file}\0{digest_file(file)}\0".encode(errors="surrogatepass"))
        return digest.hexdigest()

    def key(self, source: str, schema: Schema) -> dict[str, Any]:
        return {"source": source, "digest": self.digest(source), "schema": [schema.name, schema.kind, dict(schema.columns)],
                "split": self.split, "text_field": self.text_field, "max_examples": self.max_examples}


def make_part(source: str, reading: Reading, work: Work, said: str, say: Say) -> Part:
    """Return the part of `source`, tokenised now unless the cache has it."""
    tokenizer, template, limit = work.tokenizer, work.template, work.limit
    key = {
        "format": FORMAT, "rows": reading.key(source, work.schema),
        "tokenizer": [tokenizer.digest, tokenizer.end, tokenizer.before],
        "template": template and template.text, "train_on": work.train_on, "limit": [limit.max_length, limit.drop],
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode(errors="surrogatepass")).hexdigest()[:32]
    folder = reading.cache / "examples" / name
    if not is_whole(folder):
        say(f"tokenising {source}")
        publish(folder, partial(_build, source, reading, work, said, say))
    return open_part(folder)


def _build(source: str, reading: Reading, work: Work, said: str, say: Say, folder: Path) -> dict[str, Any]:
    files = files_of_lines(source, reading.split) if reading.max_examples is None else []
    if further := further_processes(files):
        return write_together(folder, source, stretches(files, STRETCH_BYTES), work, said, further, say)
    with PartWriter(folder, work.tokenizer.vocabulary, work.schema.kind) as writer:
        write_rows(writer, reading.rows(source, reading.max_examples), work.schema, work.encoder, Progress(source, say).tell)
        return writer.meta(work.schema, said)
