"""From what the user names as the source to rows, one after the other, whatever the size of the source.

A source is a named set of rows (docstrings) or of texts (stdlib, shakespeare), a file, a folder, a glob, or a dataset of the
hub as org/name or org/name:config. A name wins over a path that is called the same (write ./docstrings for the path), and a
path over a dataset of the hub.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from powertrain.data.documents import CORPORA, corpus_documents
from powertrain.data.reading import named_files, similar
from powertrain.data.rows.docstrings import docstring_rows
from powertrain.data.rows.files import csv_rows, json_lines, text_rows
from powertrain.data.rows.folders import LINES, OBJECTS, SHEETS, data_suffix, folder_files
from powertrain.data.rows.json_files import json_rows
from powertrain.data.rows.row import BadRow, Rejected, Row
from powertrain.data.rows.tables import arrow_rows, hub_rows, is_hub_id, parquet_rows
from powertrain.records import WrongUse

__all__ = ["ROW_SETS", "BadRow", "Rejected", "Row", "local_files", "read_rows"]

ROW_SETS = ("docstrings",)


def read_rows(source: str, *, cache: Path, split: str | None = None, text_field: str = "text",
              most: int | None = None) -> Iterator[Row | Rejected]:
    """The rows of `source`, and in their places those that cannot be read at all.

    A text file gives one row, {text_field: its text}. `split` is the part of a source that has parts: a dataset of the hub, a
    folder whose files are named after parts, a JSON file with several lists; train by default. `most` limits the rows.
    Raises WrongUse here if there is no such source, and while reading if a file is damaged or no row can be used.
    """
    found = _found(source, cache, split, text_field)
    return _usable(source, found if most is None else _first(most, found))


def local_files(source: str, split: str | None) -> list[Path] | None:
    """The files that `source` names, in the order in which they are read; None for a named set or a dataset of the hub.

    Raises WrongUse if it names none.
    """
    path = Path(source).expanduser()
    if source in (*ROW_SETS, *CORPORA) or (not path.exists() and is_hub_id(source)):
        return None
    return folder_files(path, split) if path.is_dir() else _files(source, path)


def _found(source: str, cache: Path, split: str | None, text_field: str) -> Iterator[Row | Rejected]:
    if source in ROW_SETS:
        return docstring_rows(cache)
    if source in CORPORA:
        return (Row({text_field: document.text}, document.origin) for document in corpus_documents(source, cache))
    path, files = Path(source).expanduser(), local_files(source, split)
    if files is None:
        return hub_rows(source, split, hint=_near(path) if path.parent.is_dir() else "")
    # a folder's files are all rows, or all texts, and then its .json is one of them
    if path.is_dir() and any(data_suffix(file) is None for file in files):
        return itertools.chain.from_iterable(text_rows(file, text_field) for file in files)
    return itertools.chain.from_iterable(_file_rows(file, split, text_field) for file in files)


def _near(path: Path) -> str:
    return similar(path).partition("; give a path")[0]


def _files(source: str, path: Path) -> list[Path]:
    near = [] if path.exists() else difflib.get_close_matches(source, ROW_SETS, n=1)
    if near:
        raise WrongUse(f"data.source={source}: there is no such file or folder; did you mean the set {near[0]}?")
    return named_files(source)


def _file_rows(path: Path, split: str | None, text_field: str) -> Iterator[Row | Rejected]:
    suffix = (data_suffix(path) or "").removesuffix(".gz")
    if suffix in LINES:
        return json_lines(path)
    if suffix in OBJECTS:
        return json_rows(path, split)
    if suffix in SHEETS:
        return csv_rows(path)
    if suffix == ".parquet":
        return parquet_rows(path)
    return arrow_rows(path) if suffix else text_rows(path, text_field)


def _first(most: int, found: Iterable[Row | Rejected]) -> Iterator[Row | Rejected]:
    rows = 0
    for row in found:
        yield row
        rows += isinstance(row, Row)
        if rows == most:
            return


def _usable(source: str, found: Iterable[Row | Rejected]) -> Iterator[Row | Rejected]:
    """`found` as it is. Raises WrongUse at its end if not one row could be read."""
    first: Rejected | None = None
    rejected = rows = 0
    for row in found:
        if isinstance(row, Row):
            rows += 1
        else:
            first, rejected = first or row, rejected + 1
        yield row
    if first and not rows:
        raise WrongUse(f"data.source={source} has no row that can be read: all {rejected} are bad, the first of them, "
                       f"{first.origin}: {first.reason}")
    if not rows:
        raise WrongUse(f"data.source={source} is empty: no row to train on; give a source with rows")
