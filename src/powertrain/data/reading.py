"""From what the user names as the source to documents. Text is UTF-8; nothing is guessed or skipped in silence.

In a folder, what is not text is passed over by git's rule (a NUL byte in the first 8000 bytes), and so is what is
hidden (a leading dot) or empty. Everything else must be readable, so that no document goes missing unnoticed.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from powertrain.data.documents import CORPORA, Document, corpus_documents
from powertrain.records import WrongUse

JSONL_SUFFIXES = (".jsonl", ".ndjson")
SNIFFED_BYTES = 8000                         # git: buffer_is_binary looks at the first 8000 bytes
FIELDS_NAMED = 12                            # of a row in an error: enough to choose from, short enough to read


def read_documents(source: str, *, cache: Path, text_field: str = "text",
                   max_chars: int | None = None) -> list[Document]:
    """The documents of `source`: a named corpus, a file, a folder (recursively), a glob, or JSONL.

    Files come sorted by path, one document each; a .jsonl or .ndjson file gives one per line, from `text_field`.
    Line ends stay as they are in the file (CRLF is not translated); a byte-order mark is dropped, and so are empty
    documents. `max_chars` limits the characters over all documents, in order: the last one is cut, and what comes
    after is not read. A corpus name wins over a path of that name; write ./stdlib for the path.

    Raises WrongUse if the source is missing, empty, blank, unreadable or not text.
    """
    found = corpus_documents(source, cache) if source in CORPORA else _path_documents(source, text_field)
    documents = list(_up_to(max_chars, (document for document in found if document.text)))
    if not documents:
        raise WrongUse(f"data.source={source} is empty: no text to train on; give a source with text")
    if all(document.text.isspace() for document in documents):
        characters = sum(len(document.text) for document in documents)
        raise WrongUse(f"data.source={source} is blank: its {characters} characters are all white space; "
                       "give a source with text")
    return documents


def _up_to(max_chars: int | None, documents: Iterable[Document]) -> Iterator[Document]:
    left = max_chars
    for document in documents:
        if left is None:
            yield document
            continue
        yield Document(document.text[:left], document.origin)
        left -= len(document.text)
        if left <= 0:
            return


def _path_documents(source: str, text_field: str) -> Iterator[Document]:
    for path in named_files(source):
        if path.suffix.lower() in JSONL_SUFFIXES:
            yield from _json_lines(path, text_field)
        else:
            yield Document(_read_text(path), str(path))


def named_files(source: str) -> list[Path]:
    """The files that `source` names, sorted. Raises WrongUse if there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return text_files(path)
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        matches = (Path(match) for match in glob.glob(str(path), recursive=True))
        files = sorted((match for match in matches if match.is_file()), key=Path.as_posix)
        if not files:
            raise WrongUse(f"no file matches data.source={source}; quote the pattern and check it with ls")
        return files
    if path.exists():
        raise WrongUse(f"data.source={source} is neither a file nor a folder; write its content to a file first")
    raise WrongUse(f"data.source={source}: there is no such file or folder{similar(path)}")


def similar(path: Path) -> str:
    """The end of a message that there is no such path: what may have been meant, or where to look."""
    try:
        neighbours = os.listdir(path.parent)
    except OSError:
        neighbours = []
    near = difflib.get_close_matches(path.name, neighbours, n=1)
    if near:
        return f"; did you mean {path.parent / near[0]}?"
    corpus = difflib.get_close_matches(path.name, CORPORA, n=1)
    if corpus:
        return f"; did you mean the corpus {corpus[0]}?"
    return f"; give a path from {os.getcwd()}, or a corpus: {', '.join(CORPORA)}"


def text_files(folder: Path) -> list[Path]:
    """The text files in `folder`, recursively, sorted by relative path; links to folders are not followed."""
    files = [path for path in visible_files(folder) if looks_like_text(path)]
    if not files:
        raise WrongUse(f"data.source={folder} has no text files: all are hidden, empty or binary; "
                       "give a folder with text")
    return files


def visible_files(folder: Path) -> list[Path]:
    """Return the files in `folder` that are not hidden, recursively, sorted by relative path. Raises WrongUse."""
    def refuse(error: OSError) -> None:
        raise WrongUse(f"{error.filename} cannot be read: {error.strerror}; "
                       f"change its permissions or name the files with a glob, such as '{folder}/*.txt'")

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, files), key=lambda path: path.relative_to(folder).as_posix())


def looks_like_text(path: Path) -> bool:
    """By git's rule. An empty file is none."""
    with readable(path):
        return path.stat().st_size > 0 and b"\0" not in _head(path)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SNIFFED_BYTES)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn a file that cannot be opened, read or unpacked into WrongUse with its name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise WrongUse(f"{path} cannot be read: {reason}; change its permissions, mend it or leave it out") from error


def _read_text(path: Path) -> str:
    """The text of a UTF-8 file, without its byte-order mark. Raises WrongUse with the offset of what is not text."""
    with readable(path):
        content = path.read_bytes()
    if (offset := content.find(b"\0")) >= 0:
        raise WrongUse(f"{path} is not text: NUL byte at offset {offset} of {len(content)}; "
                       "convert it to UTF-8 text or leave it out")
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} of "
                       f"{len(content)}; convert it, for example with iconv -f LATIN1 -t UTF-8") from error


def _json_lines(path: Path, text_field: str) -> Iterator[Document]:
    # not splitlines(): JSON strings may hold U+2028 and other separators raw
    lines = _read_text(path).split("\n")
    for number, line in zip(itertools.count(1), lines, strict=False):
        if line.strip():
            origin = f"{path}:{number}"
            yield Document(_field(parse_line(line, origin), text_field, origin), origin)


def parse_line(line: str, origin: str) -> dict[str, Any]:
    """The object of a line of JSONL. Raises WrongUse, which begins with `origin`."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise WrongUse(f"{origin}: not JSON: {error.msg} at column {error.colno}; "
                       "a JSONL file holds one JSON object per line") from error
    except (ValueError, RecursionError) as error:
        raise WrongUse(f"{origin}: this JSON cannot be read: {error}; mend or remove the line") from error
    if not isinstance(row, dict):
        raise WrongUse(f"{origin}: {json_kind(row)}, not an object; "
                       'a JSONL file holds one object per line, such as {"text": "..."}')
    return row


def _field(row: dict[str, Any], text_field: str, origin: str) -> str:
    if text_field not in row:
        near = difflib.get_close_matches(text_field, row, n=1)
        has = ", ".join(list(row)[:FIELDS_NAMED]) or "none"
        more = f" and {len(row) - FIELDS_NAMED} more" if len(row) > FIELDS_NAMED else ""
        cure = f"did you mean data.text_field={near[0]}?" if near else "set data.text_field to one of them"
        raise WrongUse(f"{origin}: no field {text_field!r}; it has: {has}{more}; {cure}")
    text = row[text_field]
    if not isinstance(text, str):
        raise WrongUse(f"{origin}: field {text_field!r} is {json_kind(text)}, not text; "
                       "set data.text_field to a field that holds text")
    # JSON can spell half of a surrogate pair, which is no character and has no UTF-8
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongUse(f"{origin}: field {text_field!r} holds the lone surrogate \\u{ord(text[error.start]):04x} "
                       f"at character {error.start}; mend or remove the line") from error
    return text


def json_kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
