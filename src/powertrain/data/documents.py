"""A document: one text that was written as a whole, and where it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

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
