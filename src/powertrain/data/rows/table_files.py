"""The rows of Parquet and Arrow files, through pyarrow: a few hundred at a time, from a memory-mapped file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from powertrain.data.rows.row import Rejected, Row, fault
from powertrain.records import WrongUse

BATCH_ROWS = 256                             # turned into Python's objects at a time
ARROW_FILE_MAGIC = b"ARROW1"                 # without it, an Arrow file is a stream, as `datasets` writes them


def optional_part(module: str, what: str) -> ModuleType:
    """A module of a package that need not be installed. Raises WrongUse with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise WrongUse(f"{what} needs {package}, which cannot be imported ({error}); pip install {package}") from error


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:   # pyarrow's own errors are kinds of these
        raise WrongUse(f"{path} cannot be read: {error}; make it again, or convert it to JSONL") from error


def parquet_rows(path: Path) -> Iterator[Row | Rejected]:
    parquet = optional_part("pyarrow.parquet", "reading Parquet")
    with _whole(path), parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        yield from table_rows(file.iter_batches(batch_size=BATCH_ROWS), str(path))


def arrow_rows(path: Path) -> Iterator[Row | Rejected]:
    """An Arrow file or stream."""
    arrow = optional_part("pyarrow", "reading Arrow")
    if not path.stat().st_size:
        return
    with _whole(path), arrow.memory_map(str(path)) as mapped:
        if mapped.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
            file = arrow.ipc.open_file(mapped)
            yield from table_rows((file.get_batch(i) for i in range(file.num_record_batches)), str(path))
        else:
            mapped.seek(0)
            yield from table_rows(arrow.ipc.open_stream(mapped), str(path))


def table_rows(batches: Iterator[Any], origin: str) -> Iterator[Row | Rejected]:
    """The rows of record batches or tables, with the origin "ORIGIN row N"."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for fields in _values(batch.slice(start, BATCH_ROWS)):
                number += 1
                yield _row(fields, f"{origin} row {number}")


def _values(batch: Any) -> Iterator[Any]:
    """Each row as a dict, or the error that its values give."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        # Arrow does not check that text is UTF-8 before it is looked at
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except ValueError as error:
                yield error


def _row(fields: Any, origin: str) -> Row | Rejected:
    if isinstance(fields, ValueError):
        return Rejected(origin, f"a value cannot be read: {fields}; mend or remove the row")
    reason = fault(fields)
    return Rejected(origin, reason) if reason else Row(fields, origin)
