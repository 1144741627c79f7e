"""Documents: texts that were written as a whole; and the named corpora, real text without looking for any.

`stdlib` is Python's own standard library as it lies on this machine: several MB, no download; its content, and so its
digest, differs between Python versions. `shakespeare` is tiny-shakespeare, downloaded once and verified by checksum.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from powertrain.records import WrongUse

Item = TypeVar("Item")

# The tokenizers library keeps about 150 bytes per token while a batch is encoded: some 100 MB for this many characters.
BATCH_CHARS = 2_000_000


@dataclass(frozen=True)
class Document:
    text: str                                # not empty, and encodable as UTF-8
    origin: str                              # a file, or FILE:LINE of JSONL


def digest_documents(documents: Sequence[Document]) -> str:
    """sha256 (hex) over the texts in order. Each is preceded by its length, so that moving a border changes it."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def in_batches(items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """`items` in order, in lists of BATCH_CHARS characters and whatever the last of them has on top."""
    batch: list[Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += characters(item)
        if held >= BATCH_CHARS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------ corpora

CORPORA = ("stdlib", "shakespeare")
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
    """The documents of the corpus `name`, one of CORPORA; downloads are kept in `cache`."""
    if name == "stdlib":
        yield from standard_library(Path(sysconfig.get_paths()["stdlib"]))
    else:
        yield Document(downloaded(SHAKESPEARE, cache).decode(), SHAKESPEARE.address)


def standard_library(folder: Path) -> Iterator[Document]:
    """The .py files of the standard library in `folder`, by relative path, without its generated tables.

    Those that are empty or not UTF-8 are left out too.
    Raises WrongUse if there is none: some systems ship the library zipped or compiled only.
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
    """The content of `download`, from `cache` if it is there and whole, else from its address into `cache`.

    Raises WrongUse if the address cannot be reached, sends something else, or `cache` cannot be written.
    """
    path = corpus_file(download, cache)
    if path.is_file():
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == download.sha256:
            return content
    content = _fetch(download)
    try:
        _publish(content, path)
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


def _publish(content: bytes, path: Path) -> None:
    """Writes `path` by one rename: another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
