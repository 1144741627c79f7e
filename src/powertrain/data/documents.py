"""Documents: texts that were written as a whole, read from files or from a named corpus.

Text is UTF-8; nothing is guessed or skipped in silence: every file that rows/folders.py names as text must be readable.

The corpus `stdlib` is Python's own standard library as it lies on this machine: several MB, no download; its content, and so
its digest, differs between Python versions. `shakespeare` is tiny-shakespeare, downloaded once and verified by checksum.
"""

import hashlib
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from powertrain.data.rows.files import FIELDS_NAMED, json_kind, parse_line
from powertrain.data.rows.folders import CORPORA, LINES, named_files, readable
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean
from powertrain.records.json_files import replace_file

Item = TypeVar("Item")

# The tokenizers library keeps about 150 bytes per token while a batch is encoded: some 100 MB for this many characters.
BATCH_CHARS = 2_000_000


@dataclass(frozen=True)
class Document:
    text: str                                # not empty, and encodable as UTF-8
    origin: str                              # a file, or FILE:LINE of JSONL


def digest_documents(documents: Sequence[Document]) -> str:
    """Return the sha256 (hex) of the texts in order, each after its length, so that moving a border changes the digest."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def in_batches(items: Iterable[Item], characters: Callable[[Item], int], *, most_characters: int | None = None,
               most_items: int | None = None) -> Iterator[list[Item]]:
    """Yield `items` in order, in lists that end with the item that reaches `most_characters` (BATCH_CHARS) or `most_items`."""
    batch: list[Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += characters(item)
        if held >= (most_characters or BATCH_CHARS) or len(batch) == most_items:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def read_documents(source: str, *, cache: Path, text_field: str = "text",
                   max_chars: int | None = None) -> list[Document]:
    """Return the documents of `source`: a named corpus, a file, a folder (recursively), a glob, or JSONL.

    Files come sorted by path, one document each; a .jsonl or .ndjson file gives one per line, from `text_field`.
    Line ends stay as they are in the file (CRLF is not translated); a byte-order mark is dropped, and so are empty
    documents. `max_chars` limits the characters over all documents, in order: the last one is cut, and later files are
    not read. A corpus name wins over a path of that name; write ./stdlib for the path.

    Raises WrongUse if the source is missing, empty, blank, unreadable or not text.
    """
    found = corpus_documents(source, cache) if source in CORPORA else _path_documents(source, text_field)
    documents = list(_up_to(max_chars, (document for document in found if document.text)))
    if not documents:
        raise WrongUse(f"{source} is empty: no text to train on; give a source with text")
    if all(document.text.isspace() for document in documents):
        characters = sum(len(document.text) for document in documents)
        raise WrongUse(f"{source} is blank: its {characters} characters are all white space; "
                       "give a source with text")
    return documents


def _up_to(max_chars: int | None, documents: Iterable[Document]) -> Iterator[Document]:
    left = sys.maxsize if max_chars is None else max_chars
    for document in documents:
        yield Document(document.text[:left], document.origin)
        left -= len(document.text)
        if left <= 0:
            return


def _path_documents(source: str, text_field: str) -> Iterator[Document]:
    for path in named_files(source):
        text = _read_text(path)
        if path.suffix.lower() not in LINES:
            yield Document(text, str(path))
            continue
        # not splitlines(): JSON strings may hold U+2028 and other separators raw
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                origin = f"{path}:{number}"
                yield Document(_field(parse_line(line, origin), text_field, origin), origin)


def _read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without its byte-order mark. Raises WrongUse with the offset of a wrong byte."""
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


def _field(row: dict[str, Any], text_field: str, origin: str) -> str:
    if text_field not in row:
        has = ", ".join(list(row)[:FIELDS_NAMED]) or "none"
        more = f" and {len(row) - FIELDS_NAMED} more" if len(row) > FIELDS_NAMED else ""
        cure = did_you_mean(text_field, row, key="data.text_field", otherwise="set data.text_field to one of them")
        raise WrongUse(f"{origin}: no field {text_field!r}; it has: {has}{more}{cure}")
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


# ------------------------------------------------------------------------------------------------ corpora

DOWNLOAD_TIMEOUT_S = 30.0                    # of each socket operation, not of the whole download
# tests, installed packages and tools that ship beside the library but are not part of it
NOT_LIBRARY = frozenset({"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__",
                         "turtledemo"})
# generated tables, a fifth of the text: of them a model learns the names of characters, not Python
TABLES = frozenset({"encodings", "pydoc_data"})


@dataclass(frozen=True)
class Download:
    """A text with a public address, and the checksum that says it is the same text everywhere."""

    address: str
    sha256: str
    file: str                                # its name in the cache


SHAKESPEARE = Download(
    address="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    file="tinyshakespeare.txt",
)


def corpus_documents(name: str, cache: Path) -> Iterator[Document]:
    """Yield the documents of the corpus `name`, one of CORPORA; downloads are kept in `cache`."""
    if name == "stdlib":
        yield from standard_library(Path(sysconfig.get_paths()["stdlib"]))
    else:
        yield Document(downloaded(SHAKESPEARE, cache).decode(), SHAKESPEARE.address)


def standard_library(folder: Path) -> Iterator[Document]:
    """Yield the .py files of the standard library in `folder`, by relative path.

    Generated tables are left out, and so are files that are empty or not UTF-8.
    Raises WrongUse if no file is left: some systems ship the library zipped or compiled only.
    """
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    library = sorted((path for path in relative if (NOT_LIBRARY | TABLES).isdisjoint(path.parts)
                      and not path.name.startswith("_sysconfigdata")), key=Path.as_posix)
    found = False
    for path in library:
        try:
            text = (folder / path).read_bytes().decode("utf-8")
        except (UnicodeDecodeError, PermissionError):
            continue
        if text:
            found = True
            yield Document(text, str(folder / path))
    if not found:
        raise WrongUse(f"data.source=stdlib: no .py file in {folder}; this Python ships its library without sources: "
                       "pass data.source=PATH with text of your own")


def corpus_file(download: Download, cache: Path) -> Path:
    """Return where the download is kept."""
    return cache / "corpora" / download.file


def downloaded(download: Download, cache: Path) -> bytes:
    """Return the content of `download`, from `cache` if it is there and whole, else from its address into `cache`.

    Raises WrongUse if the address cannot be reached, sends something else, or `cache` cannot be written.
    """
    path = corpus_file(download, cache)
    if path.is_file():
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == download.sha256:
            return content
    content = _fetch(download)
    try:
        replace_file(path, content)
    except OSError as error:
        raise WrongUse(f"the cache folder {path.parent} cannot be written: {error.strerror}; "
                       "choose another cache folder or free it") from error
    return content


def _fetch(download: Download) -> bytes:
    cure = "download it yourself and pass data.source=PATH"
    try:
        with urllib.request.urlopen(download.address, timeout=DOWNLOAD_TIMEOUT_S) as response:
            content: bytes = response.read()
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise WrongUse(f"{download.address} cannot be downloaded: {reason}; {cure}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != download.sha256:
        raise WrongUse(f"{download.address} sent {len(content)} bytes with sha256 {found}, not {download.sha256}; "
                       f"try again, or {cure}")
    return content
