"""The rows of one file, one after the other: JSONL, CSV and TSV by the line, tables by the batch, a text as one row.

Memory stays flat whatever the file's size: no line, field or text that is longer than its limit is taken in, and only a JSON
file that is one object is held as a whole. A row that cannot be read is yielded as Rejected, so that a check can list them;
a file that cannot be read is WrongUse. Any of them may be compressed with gzip (.gz).
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from powertrain.data.reading import SNIFFED_BYTES, parse_line, readable
from powertrain.data.rows.row import Rejected, Row, fault
from powertrain.records import WrongUse

LONGEST_LINE_BYTES = 64 << 20                # of JSONL or CSV; far above any row, far below what fills a memory
LONGEST_FIELD_CHARS = 16 << 20               # of CSV, which holds 4 bytes per character: what a quote left open can take in
LONGEST_TEXT_BYTES = 256 << 20               # of a file that is one text

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# JSON's own spelling of NUL and of half a surrogate pair: only a line that has one needs its values looked at
SUSPECT = re.compile(rb"\\u(0000|d[89a-f])", re.IGNORECASE)
DELIMITERS = ",;\t"                          # of CSV, tried on the header in this order
READABLE = "JSONL, JSON, CSV, TSV, Parquet, Arrow and UTF-8 text"


def opened(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked if its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def utf8_fault(error: UnicodeDecodeError) -> str:
    return (f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "convert the file, for example with iconv -f LATIN1 -t UTF-8")


def numbered_lines(file: IO[bytes], first: int = 1, size_bytes: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Each line with its number, counted from `first`, until `size_bytes` are read; None for one that is longer than
    LONGEST_LINE_BYTES.
    """
    passed_bytes = 0
    for number in itertools.count(first):
        # only at \n: a JSON string may hold U+2028 and other separators raw
        if (size_bytes is not None and passed_bytes >= size_bytes) or not (line := file.readline(LONGEST_LINE_BYTES)):
            return
        passed_bytes += len(line)
        if len(line) < LONGEST_LINE_BYTES or line.endswith(b"\n"):
            yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            continue
        while rest := file.readline(LONGEST_LINE_BYTES):
            passed_bytes += len(rest)
            if rest.endswith(b"\n"):
                break
        yield number, None


# ------------------------------------------------------------------------------------------------ JSONL


def json_lines(path: Path, start: int = 0, first: int = 1, size_bytes: int | None = None) -> Iterator[Row | Rejected]:
    """One object per line; blank lines count as lines and give no row. All of the file, or `size_bytes` of it from the byte
    `start` on, where its line `first` begins.
    """
    with readable(path), opened(path) as file:
        if start:
            file.seek(start)
        for number, line in numbered_lines(file, first, size_bytes):
            origin = f"{path}:{number}"
            if line is None:
                yield Rejected(origin, f"more than {LONGEST_LINE_BYTES >> 20} MiB in one line; JSONL holds one row per line")
            elif not line.isspace():
                yield _json_line(line, origin)


def _json_line(line: bytes, origin: str) -> Row | Rejected:
    try:
        fields = parse_line(line.decode("utf-8").rstrip("\r\n"), origin)
    except UnicodeDecodeError as error:
        return Rejected(origin, utf8_fault(error))
    except WrongUse as error:
        return Rejected(origin, str(error).removeprefix(f"{origin}: "))
    if SUSPECT.search(line) and (reason := fault(fields)):
        return Rejected(origin, reason)
    return Row(fields, origin)


def is_json_lines(path: Path) -> bool:
    """Whether a file is JSONL whatever it is called: an object on the first line, and more behind it."""
    with readable(path), opened(path) as file:
        if not file.read(len(BYTE_ORDER_MARK) + 1).removeprefix(BYTE_ORDER_MARK).startswith(b"{"):
            return False
        file.seek(0)
        first = file.readline(LONGEST_LINE_BYTES).removeprefix(BYTE_ORDER_MARK)
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return False
        return any(not (line or b"{").isspace() for _, line in numbered_lines(file))


# ------------------------------------------------------------------------------------------------ CSV and TSV


def csv_rows(path: Path) -> Iterator[Row | Rejected]:
    """Rows under a header, quoted as RFC 4180 says; a row's origin is the line where it begins.

    What violates the quoting is rejected rather than read as something else.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD_CHARS))  # the csv module has one for the process
    with readable(path), opened(path) as file:
        lines = _csv_lines(path, file)
        first = next(lines, "")
        delimiter = _delimiter(path, first)
        reader = csv.reader(itertools.chain([first] if first else [], lines), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            origin = f"{path}:{reader.line_num + 1}"
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if header is None:
                    raise WrongUse(f"{origin}: the header cannot be read: {error}; {_csv_cure(str(error))}") from error
                yield Rejected(origin, f"{error}; {_csv_cure(str(error))}")
                continue
            if not values:
                continue
            if header is None:
                header = _header(values, origin)
            else:
                yield _csv_row(header, values, origin)


def _csv_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number, line in numbered_lines(file):
        if line is None:
            raise WrongUse(f"{path}:{number}: more than {LONGEST_LINE_BYTES >> 20} MiB in one line; is it CSV?")
        # what is not UTF-8 becomes surrogates here, so that the row that holds it can be rejected, and no other
        yield line.decode("utf-8", "surrogateescape")


def _delimiter(path: Path, header: str) -> str:
    if ".tsv" in (suffix.lower() for suffix in path.suffixes):
        return "\t"
    return next((delimiter for delimiter in DELIMITERS if delimiter in header), DELIMITERS[0])


def _csv_cure(reason: str) -> str:
    if "end of data" in reason or "field limit" in reason:
        return "a quote that opens here is never closed: close it, or double it"
    return "a quote inside a quoted field is written twice"


def _header(values: list[str], origin: str) -> list[str]:
    names = [value.strip() for value in values]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WrongUse(f"{origin}: the header names the column {twice!r} twice; rename one")
    if any(not _is_utf8(name) for name in names):
        raise WrongUse(f"{origin}: the header is not UTF-8; convert the file, for example with iconv -f LATIN1 -t UTF-8")
    return names


def _csv_row(header: list[str], values: list[str], origin: str) -> Row | Rejected:
    if len(values) != len(header):
        return Rejected(origin, f"{len(values)} fields where the header names {len(header)}; quote those that hold a delimiter")
    if not all(_is_utf8(value) for value in values):
        return Rejected(origin, "not UTF-8; convert the file, for example with iconv -f LATIN1 -t UTF-8")
    if reason := fault(values):
        return Rejected(origin, reason)
    return Row(dict(zip(header, values, strict=True)), origin)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ text


def text_rows(path: Path, text_field: str) -> Iterator[Row | Rejected]:
    """The whole file as one row, its line ends as they are; none if it is empty."""
    with readable(path), opened(path) as file:
        content = file.read(LONGEST_TEXT_BYTES + 1).removeprefix(BYTE_ORDER_MARK)
    if b"\0" in content[:SNIFFED_BYTES]:
        raise WrongUse(f"{path} is not text: NUL byte at offset {content.find(0)} of {len(content)}; "
                       f"what can be read is {READABLE}")
    if len(content) > LONGEST_TEXT_BYTES:
        raise WrongUse(f"{path} has more than {LONGEST_TEXT_BYTES >> 20} MiB, and a text file is one example; "
                       'write it as JSONL, {"text": "..."} on each line')
    if content:
        yield _text_row(content, str(path), text_field)


def _text_row(content: bytes, origin: str, text_field: str) -> Row | Rejected:
    try:
        fields: dict[str, Any] = {text_field: content.decode("utf-8")}
    except UnicodeDecodeError as error:
        return Rejected(origin, utf8_fault(error))
    reason = fault(fields)
    return Rejected(origin, reason) if reason else Row(fields, origin)
