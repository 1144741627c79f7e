"""The rows of tables: CSV and TSV by the line, Parquet and Arrow through pyarrow, a few hundred rows at a time."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from powertrain.data.rows.files import LONGEST_LINE_BYTES, numbered_lines, opened
from powertrain.data.rows.folders import readable
from powertrain.data.rows.row import Rejected, Row, checked
from powertrain.records import WrongUse

LONGEST_FIELD_CHARS = 16 << 20               # of CSV, which holds 4 bytes per character: what a quote left open can take in
DELIMITERS = ",;\t"                          # of CSV, tried on the header in this order
NOT_UTF8 = "not UTF-8; convert the file, for example with iconv -f LATIN1 -t UTF-8"


def csv_rows(path: Path) -> Iterator[Row | Rejected]:
    """Yield the rows under a header, quoted as RFC 4180 says; a row's origin is the line where it begins.

    A row that violates the quoting is rejected rather than read as something else.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD_CHARS))  # the csv module has one for the process
    with readable(path), opened(path) as file:
        lines = _csv_lines(path, file)
        first = next(lines, "")
        delimiters = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes) else DELIMITERS
        delimiter = next((delimiter for delimiter in delimiters if delimiter in first), delimiters[0])
        reader = csv.reader(itertools.chain([first] if first else [], lines), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            origin = f"{path}:{reader.line_num + 1}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                unclosed = "end of data" in str(error) or "field limit" in str(error)
                cure = "a quote that opens here is never closed: close it, or double it" if unclosed else \
                    "a quote inside a quoted field is written twice"
                reason = f"{error}; {cure}"
                if header is None:
                    raise WrongUse(f"{origin}: the header cannot be read: {reason}") from error
                yield Rejected(origin, reason)
                continue
            if header is None:
                header = _header(values, origin) if values else None
            elif values:
                yield _csv_row(header, values, origin)


def _csv_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in numbered_lines(file):
        if line is None:
            raise WrongUse(f"{path}:{number}: more than {LONGEST_LINE_BYTES >> 20} MiB in one line; is it CSV?")
        # bytes that are not UTF-8 become surrogates here, so that only the row that holds them is rejected
        yield line.decode("utf-8", "surrogateescape")


def _header(values: list[str], origin: str) -> list[str]:
    names = [value.strip() for value in values]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WrongUse(f"{origin}: the header names the column {twice!r} twice; rename one")
    if not _are_utf8(names):
        raise WrongUse(f"{origin}: the header is {NOT_UTF8}")
    return names


def _csv_row(header: list[str], values: list[str], origin: str) -> Row | Rejected:
    if len(values) != len(header):
        return Rejected(origin, f"{len(values)} fields where the header names {len(header)}; quote those that hold a delimiter")
    return checked(dict(zip(header, values, strict=True)), origin) if _are_utf8(values) else Rejected(origin, NOT_UTF8)


def _are_utf8(texts: Iterable[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ Parquet and Arrow

BATCH_ROWS = 256                             # turned into Python's objects at a time
ARROW_FILE_MAGIC = b"ARROW1"                 # without it, an Arrow file is a stream, as `datasets` writes them


def optional_part(module: str, purpose: str) -> ModuleType:
    """Import a module of a package that need not be installed. Raises WrongUse with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise WrongUse(f"{purpose} needs {package}, which cannot be imported ({error}); pip install {package}") from error


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
    """Yield the rows of an Arrow file or stream."""
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
    """Yield the rows of record batches or tables, with the origin "ORIGIN row N"."""
    pieces = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, batch.num_rows, BATCH_ROWS))
    for number, fields in enumerate(itertools.chain.from_iterable(map(_values, pieces)), 1):
        place = f"{origin} row {number}"
        yield checked(fields, place) if not isinstance(fields, ValueError) else \
            Rejected(place, f"a value cannot be read: {fields}; mend or remove the row")


def _values(batch: Any) -> Iterator[Any]:
    """Yield each row as a dict, or the error that its values give."""
    try:
        yield from batch.to_pylist()
    except ValueError:
        # Arrow does not check that text is UTF-8 before it is looked at
        for i in range(batch.num_rows):
            try:
                yield batch.slice(i, 1).to_pylist()[0]
            except ValueError as error:
                yield error
