"""Documents: texts that were written as a whole, read from files or from a named corpus.

Text is UTF-8; nothing is guessed or skipped in silence: every file that rows/folders.py names as text must be readable.

The corpus `stdlib` is Python's own standard library as it lies on this machine: several MB, no download; its content, and so
its digest, differs between Python versions. `shakespeare` is tiny-shakespeare, downloaded once and verified by checksum.
"""

from __future__ import annotations

import codecs
import hashlib
import sys
import sysconfig
import urllib.request
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from powertrain.data.rows.files import FIELDS_NAMED, json_kind, parse_line
from powertrain.data.rows.folders import CORPORA, LINES, digests_of, named_files, readable
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean
from powertrain.records.json_files import replace_file

Item = TypeVar("Item")

# The tokenizers library keeps about 150 bytes per token while a batch is encoded: some 100 MB for this many characters.
BATCH_CHARS = 2_000_000
PIECE_BYTES = 1 << 20                        # of a file that are in memory


@dataclass(frozen=True)
class Document:
    content: str | Path                      # not empty, and encodable as UTF-8
    origin: str                              # a file, or FILE:LINE of JSONL
    most: int = sys.maxsize                  # characters; the rest is no part of it

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces that are not empty; a file is read anew each time."""
        left = self.most
        for piece in (self.content,) if isinstance(self.content, str) else text_pieces(self.content):
            if not (kept := piece[:left]):
                return
            yield kept
            left -= len(kept)

    @property
    def text(self) -> str:
        return "".join(self.pieces())


@dataclass(frozen=True)
class Measured:
    """What is counted of documents before any of them is tokenised: a few bytes for each."""

    characters: array[int]                   # of each document
    hashes: array[int]                       # equal for equal texts
    text_bytes: int                          # UTF-8
    digest: str                              # sha256 of all texts in order

    @property
    def several(self) -> bool:
        return len(self.characters) > 1


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


@dataclass(frozen=True)
class Texts:
    """The documents of a source, read anew whenever they are asked for: a named corpus, a file, a folder, a glob, or JSONL.

    Files come sorted by path, one document each; a .jsonl or .ndjson file gives one per line, from `text_field`.
    Line ends stay as they are in the file (CRLF is not translated); a byte-order mark is dropped, and so are empty
    documents. `max_chars` limits the characters over all documents, in order: the last one is cut, and later files are
    not read. A corpus name wins over a path of that name; write ./stdlib for the path.
    """

    source: str
    cache: Path                              # for downloads
    text_field: str = "text"
    max_chars: int | None = None

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents. Raises WrongUse if the source is missing, unreadable or not text."""
        found = corpus_documents(self.source, self.cache) if self.source in CORPORA else self._in_files()
        return self._up_to_most(document for document in found if any(document.pieces()))

    def _in_files(self) -> Iterator[Document]:
        for path in named_files(self.source):
            if path.suffix.lower() not in LINES:
                yield Document(path, str(path))
                continue
            for number, line in enumerate(_lines(path), 1):
                if line.strip():
                    origin = f"{path}:{number}"
                    yield Document(_field(parse_line(line, origin), self.text_field, origin), origin)

    def _up_to_most(self, documents: Iterable[Document]) -> Iterator[Document]:
        left = self.max_chars
        for document in documents:
            if left is None:
                yield document
                continue
            document = replace(document, most=left)
            yield document
            left -= sum(map(len, document.pieces()))
            if left <= 0:
                return

    def measured(self) -> Measured:
        """Return what is counted of all documents. Raises WrongUse if there is no text in them."""
        characters, hashes, size_bytes, blank, digest = array("q"), array("Q"), 0, True, hashlib.sha256()
        for document in self:
            count, bytes_before, of_text = 0, size_bytes, hashlib.blake2b(digest_size=8)
            for piece in document.pieces():
                content = piece.encode()
                of_text.update(content)
                count, size_bytes, blank = count + len(piece), size_bytes + len(content), blank and piece.isspace()
            # each after its length, so that moving a border changes the digest
            digest.update((size_bytes - bytes_before).to_bytes(8, "little"))
            for piece in document.pieces():
                digest.update(piece.encode())
            characters.append(count)
            hashes.append(int.from_bytes(of_text.digest()))
        if not characters:
            raise WrongUse(f"{self.source} is empty: no text to train on; give a source with text")
        if blank:
            raise WrongUse(f"{self.source} is blank: its {sum(characters)} characters are all white space; "
                           "give a source with text")
        return Measured(characters, hashes, size_bytes, digest.hexdigest())

    def fingerprint(self) -> list[str]:
        """Return what changes with the content of the source, without reading all of large files."""
        if self.source in CORPORA:
            return [self.measured().digest]
        files = named_files(self.source)
        return [path.suffix + digest for path, digest in zip(files, digests_of(files), strict=True)]


def read_documents(source: str, *, cache: Path, text_field: str = "text", max_chars: int | None = None) -> list[Document]:
    """Return the documents of `source`. Raises WrongUse as `Texts` does."""
    texts = Texts(source, cache, text_field, max_chars)
    texts.measured()
    return list(texts)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, without their line ends."""
    parts = list[str]()                      # of the line that has begun
    for piece in text_pieces(path):
        # not splitlines(): JSON strings may hold U+2028 and other separators raw
        first, *others = piece.split("\n")
        parts.append(first)
        for line in others:
            yield "".join(parts)
            parts = [line]
    yield "".join(parts)


def text_pieces(path: Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file, without its byte-order mark. Raises WrongUse with the offset of a wrong byte."""
    decoder, start, content = codecs.getincrementaldecoder("utf-8")(), 0, b"first"
    with readable(path), path.open("rb") as file:
        size_bytes = path.stat().st_size
        while content:
            content = file.read(PIECE_BYTES)
            if (offset := content.find(b"\0")) >= 0:
                raise WrongUse(f"{path} is not text: NUL byte at offset {start + offset} of {size_bytes}; "
                               "convert it to UTF-8 text or leave it out")
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                offset = start + len(content) - len(error.object) + error.start      # it begins with what was left before
                raise WrongUse(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset} of "
                               f"{size_bytes}; convert it, for example with iconv -f LATIN1 -t UTF-8") from error
            text = text if start else text.removeprefix("\ufeff")
            start += len(content)
            if text:
                yield text


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
