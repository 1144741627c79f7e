"""The rows of one file of text, one after the other: JSONL by the line, a JSON list by the item, a plain text as one row.

Memory stays flat whatever the file's size: each line, item and text has a length limit. Only a JSON file that is one object, as
SQuAD's files are, is held as a whole, because which of its values is the list of rows is known only at its end. A row that
cannot be read is yielded as Rejected, so that a check can list it; a file that cannot be read is WrongUse. Any file may be
compressed with gzip (.gz).
"""

import gzip
import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO, cast

from powertrain.data.rows.folders import SNIFFED_BYTES, choose_split, readable
from powertrain.data.rows.row import Rejected, Row, checked
from powertrain.records import WrongUse

LONGEST_LINE_BYTES = 64 << 20                # of JSONL or CSV; far above any row, far below what fills a memory
LONGEST_TEXT_BYTES = 256 << 20               # of a file that is one text
FIELDS_NAMED = 12                            # of a row in an error: enough to choose from, short enough to read
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# JSON's own spelling of NUL and of half a surrogate pair: only a line that has one needs its values looked at
SUSPECT = re.compile(rb"\\u(0000|d[89a-f])", re.IGNORECASE)
READABLE = "JSONL, JSON, CSV, TSV, Parquet, Arrow and UTF-8 text"


def opened(path: Path) -> IO[bytes]:
    """Open the file's bytes, unpacked if its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def utf8_fault(error: UnicodeDecodeError) -> str:
    return (f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "convert the file, for example with iconv -f LATIN1 -t UTF-8")


def numbered_lines(file: IO[bytes], first: int = 1, size_bytes: int | None = None) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number, counted from `first`, until `size_bytes` are read.

    A line that is longer than LONGEST_LINE_BYTES is None.
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


def json_kind(value: Any) -> str:
    """Return what a value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def text_rows(path: Path, text_field: str) -> Iterator[Row | Rejected]:
    """Yield the whole file as one row, its line ends as they are; nothing if it is empty."""
    with readable(path), opened(path) as file:
        content = file.read(LONGEST_TEXT_BYTES + 1).removeprefix(BYTE_ORDER_MARK)
    if b"\0" in content[:SNIFFED_BYTES]:
        raise WrongUse(f"{path} is not text: NUL byte at offset {content.find(0)} of {len(content)}; "
                       f"what can be read is {READABLE}")
    if len(content) > LONGEST_TEXT_BYTES:
        raise WrongUse(f"{path} has more than {LONGEST_TEXT_BYTES >> 20} MiB, and a text file is one example; "
                       'write it as JSONL, {"text": "..."} on each line')
    if content:
        try:
            yield checked({text_field: content.decode("utf-8")}, str(path))
        except UnicodeDecodeError as error:
            yield Rejected(str(path), utf8_fault(error))


# ------------------------------------------------------------------------------------------------ JSONL


def json_lines(path: Path, start: int = 0, first: int = 1, size_bytes: int | None = None) -> Iterator[Row | Rejected]:
    """Yield one row per line; blank lines count as lines and give no row.

    The whole file is read, or `size_bytes` of it from the byte `start` on, where its line `first` begins.
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
        fields = _object_of(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return Rejected(origin, utf8_fault(error))
    except WrongUse as error:
        return Rejected(origin, str(error))
    return checked(fields, origin) if SUSPECT.search(line) else Row(fields, origin)


def parse_line(line: str, origin: str) -> dict[str, Any]:
    """Return the object of a line of JSONL. Raises WrongUse, which begins with `origin`."""
    try:
        return _object_of(line)
    except WrongUse as error:
        raise WrongUse(f"{origin}: {error}") from error


def _object_of(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise WrongUse(f"not JSON: {error.msg} at column {error.colno}; a JSONL file holds one JSON object per line") from error
    except (ValueError, RecursionError) as error:
        raise WrongUse(f"this JSON cannot be read: {error}; mend or remove the line") from error
    if not isinstance(row, dict):
        raise WrongUse(f'{json_kind(row)}, not an object; a JSONL file holds one object per line, such as {{"text": "..."}}')
    return row


def is_json_lines(path: Path) -> bool:
    """Return whether a file is JSONL whatever it is called: an object on the first line, and more behind it."""
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


# ------------------------------------------------------------------------------------------------ a JSON list

CHUNK_CHARS = 1 << 20                        # read at a time
LONGEST_ITEM_CHARS = 64 << 20                # of a list: one that goes on for longer has lost a quote or a bracket
LARGEST_OBJECT_CHARS = 256 << 20             # Python's objects take some ten times the file's size
SPACE = re.compile(r"[ \t\n\r]*")
TURN_LISTS = ("messages", "conversations")   # an object with one of these is a row, not a list of rows


def json_rows(path: Path, split: str | None) -> Iterator[Row | Rejected]:
    """Yield the objects of a JSON file, with the origin "FILE item N". JSONL that is called .json is read as JSONL."""
    if is_json_lines(path):
        yield from json_lines(path)
        return
    with readable(path), opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            head = text.read(CHUNK_CHARS)
            items = _list_items(path, text, head) if head.lstrip().startswith("[") else _object_items(path, text, head, split)
            for number, item in enumerate(items, 1):
                origin = f"{path} item {number}"
                yield checked(item, origin) if isinstance(item, dict) else \
                    Rejected(origin, f"{json_kind(item)}, not an object")
        except UnicodeDecodeError as error:
            raise WrongUse(f"{path}: {utf8_fault(error)}") from error


def _list_items(path: Path, file: TextIO, held: str) -> Iterator[Any]:
    """Yield the values of the list that begins in `held` and goes on in `file`."""
    decode = json.JSONDecoder().raw_decode
    at = _behind_space(held, held.index("[") + 1)
    for number in itertools.count(1):
        while True:
            if number == 1 and held[at:at + 1] == "]":
                return
            try:
                value, end = decode(held, at)
                end = _behind_space(held, end)
            except (ValueError, RecursionError) as error:
                value, end = None, len(held)
                problem = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            else:
                problem = "it ends before its list does"
            # at the end of what is held, even a number that could be decoded may go on
            if end < len(held):
                break
            more = file.read(max(CHUNK_CHARS, len(held) - at))
            if not more or len(held) - at > LONGEST_ITEM_CHARS:
                raise WrongUse(f"{path} item {number}: not JSON: {problem}; mend the file, or write it as JSONL")
            held, at = held[at:] + more, 0
            at = _behind_space(held, at)
        yield value
        if held[end] == "]":
            if rest := (held[end + 1:] + file.read(CHUNK_CHARS)).strip():
                raise WrongUse(f"{path} goes on after its list with {rest[:20]!r}; a JSON file holds one value")
            return
        if held[end] != ",":
            raise WrongUse(f"{path} item {number}: not JSON: {held[end]!r} where a comma or ] should follow; "
                           "mend the file, or write it as JSONL")
        at = _behind_space(held, end + 1)


def _behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None                 # it may be empty, and so always matches
    return found.end()


# ------------------------------------------------------------------------------------------------ a JSON object


def _object_items(path: Path, file: TextIO, head: str, split: str | None) -> Iterator[Any]:
    text = head + file.read(LARGEST_OBJECT_CHARS)
    if not text.strip():
        return
    if len(text) > LARGEST_OBJECT_CHARS:
        raise WrongUse(f"{path} is one JSON object of more than {LARGEST_OBJECT_CHARS >> 20} Mi characters, which would be "
                       "held in memory as a whole; write it as JSONL, one row per line")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise WrongUse(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}; mend the file") from error
    except (ValueError, RecursionError) as error:
        raise WrongUse(f"{path}: this JSON cannot be read: {error}; mend the file, or write it as JSONL") from error
    if not isinstance(document, dict):
        raise WrongUse(f"{path} holds {json_kind(document)}; rows are objects in a list, such as [{{\"text\": \"...\"}}]")
    items = [document] if any(name in document for name in TURN_LISTS) else _only_list(path, document, split)
    for item in items:
        yield from _questions(item) if isinstance(item, dict) and isinstance(item.get("paragraphs"), list) else [item]


def _only_list(path: Path, document: dict[str, Any], split: str | None) -> list[Any]:
    lists = {name: value for name, value in document.items() if isinstance(value, list)}
    if len(lists) == 1:
        return next(iter(lists.values()))
    if not lists:
        names = ", ".join(list(document)[:FIELDS_NAMED]) or "nothing"
        raise WrongUse(f"{path} is one object with {names}, and none of them is a list of rows; "
                       "write rows as a list of objects, or as JSONL")
    return lists[choose_split(str(path), list(lists), split)]


def _questions(article: dict[str, Any]) -> Iterator[Any]:
    """Yield SQuAD's articles, paragraphs and questions as one row per question."""
    for paragraph in article["paragraphs"]:
        questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
        if not isinstance(questions, list):
            yield paragraph
            continue
        shared = {"title": article.get("title"), "context": paragraph.get("context")}
        yield from ({**shared, **question} if isinstance(question, dict) else question for question in questions)
