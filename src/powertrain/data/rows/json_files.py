"""The rows of a JSON file: a list of objects, or an object that has such a list, as SQuAD's files do.

A list is read by the item, so that its length costs no memory. An object is read whole, because which of its values is the
list is known only at its end; so its size has a limit.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from powertrain.data.reading import FIELDS_NAMED, json_kind, readable
from powertrain.data.rows.files import is_json_lines, json_lines, opened, utf8_fault
from powertrain.data.rows.folders import choose_split
from powertrain.data.rows.row import Rejected, Row, fault
from powertrain.records import WrongUse

CHUNK_CHARS = 1 << 20                        # read at a time
LONGEST_ITEM_CHARS = 64 << 20                # of a list: one that goes on for longer has lost a quote or a bracket
LARGEST_OBJECT_CHARS = 256 << 20             # Python's objects take some ten times the file's size
SPACE = re.compile(r"[ \t\n\r]*")
TURN_LISTS = ("messages", "conversations")   # an object with one of these is a row, not a list of rows


def json_rows(path: Path, split: str | None) -> Iterator[Row | Rejected]:
    """The objects of a JSON file, with the origin "FILE item N". JSONL that is called .json is read as JSONL."""
    if is_json_lines(path):
        yield from json_lines(path)
        return
    with readable(path), opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            head = text.read(CHUNK_CHARS)
            items = _list_items(path, text, head) if head.lstrip().startswith("[") else _object_items(path, text, head, split)
            for number, item in enumerate(items, 1):
                yield _row(item, f"{path} item {number}")
        except UnicodeDecodeError as error:
            raise WrongUse(f"{path}: {utf8_fault(error)}") from error


def _row(item: Any, origin: str) -> Row | Rejected:
    if not isinstance(item, dict):
        return Rejected(origin, f"{json_kind(item)}, not an object")
    reason = fault(item)
    return Rejected(origin, reason) if reason else Row(item, origin)


# ------------------------------------------------------------------------------------------------ a list


def _list_items(path: Path, file: TextIO, held: str) -> Iterator[Any]:
    """The values of the list that begins in `held` and goes on in `file`."""
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
                value, end, problem = None, len(held), _problem(error)
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
            _check_rest(path, held[end + 1:] + file.read(CHUNK_CHARS))
            return
        if held[end] != ",":
            raise WrongUse(f"{path} item {number}: not JSON: {held[end]!r} where a comma or ] should follow; "
                           "mend the file, or write it as JSONL")
        at = _behind_space(held, end + 1)


def _behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None                 # it may be empty, and so always matches
    return found.end()


def _problem(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _check_rest(path: Path, rest: str) -> None:
    if rest.strip():
        raise WrongUse(f"{path} goes on after its list with {rest.strip()[:20]!r}; a JSON file holds one value")


# ------------------------------------------------------------------------------------------------ an object


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
    """SQuAD's articles, paragraphs and questions as one row per question."""
    for paragraph in article["paragraphs"]:
        questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
        if not isinstance(questions, list):
            yield paragraph
            continue
        shared = {"title": article.get("title"), "context": paragraph.get("context")}
        yield from ({**shared, **question} if isinstance(question, dict) else question for question in questions)
