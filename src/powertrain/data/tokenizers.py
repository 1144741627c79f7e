"""Text to token ids and back: what every tokenizer here offers, and the two doors to one, made or reopened.

`char` and `byte` are exact tables (table_tokenizers.py); `bpe` is trained here and a folder is anyone's Hugging Face
tokenizer (library_tokenizers.py). Each saves to a folder that transformers.AutoTokenizer opens with equal ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from powertrain.data.documents import Document
from powertrain.data.library_tokenizers import BytePairTokenizer, FolderTokenizer
from powertrain.data.table_tokenizers import MARKER, ByteTokenizer, CharTokenizer, marked_kind
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean

BPE_VOCABULARY = 4096
KINDS = ("char", "byte", "bpe")


class Tokenizer(Protocol):
    """Ids are below `vocabulary`; `end_of_text` follows each document, where there is one.

    `encode` never gives the id of end_of_text for text that spells it, except in a folder tokenizer, which keeps its
    own rules. `decode` leaves special tokens in the text.
    """

    @property
    def kind(self) -> str: ...               # "char", "byte", "bpe", or "folder"
    @property
    def vocabulary(self) -> int: ...
    @property
    def end_of_text(self) -> int | None: ...
    @property
    def digest(self) -> str: ...             # sha256 (hex) of all that decides the ids

    def encode(self, text: str) -> npt.NDArray[Any]: ...                         # (tokens,) uint16 or uint32
    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]: ...
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str: ...
    def save(self, folder: Path) -> None: ...


def make_tokenizer(kind: str, documents: Sequence[Document], vocabulary: int | None = None) -> Tokenizer:
    """The tokenizer `kind`: "char" or "bpe" made from `documents`, "byte", or a folder that holds one.

    `vocabulary` is the size of a bpe trained here (default 4096); data with little variety may give fewer tokens.
    Raises WrongUse if the kind is unknown, the folder holds no tokenizer, or a vocabulary is asked of another kind.
    """
    check_tokenizer(kind, vocabulary)
    texts = [document.text for document in documents]
    if kind == "char":
        return CharTokenizer.of_texts(texts, with_end_of_text=len(documents) > 1)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return BytePairTokenizer.trained(texts, vocabulary or BPE_VOCABULARY)
    return load_tokenizer(Path(kind).expanduser())


def check_tokenizer(kind: str, vocabulary: int | None) -> None:
    """Raises WrongUse if no tokenizer of this kind and size can be made, without making it."""
    if kind not in KINDS and not Path(kind).expanduser().is_dir():
        cure = did_you_mean(kind, KINDS, otherwise="give one of these, or the folder that has its tokenizer.json")
        raise WrongUse(f"data.tokenizer={kind} is neither char, byte, bpe nor a folder{cure}")
    if kind != "bpe" and vocabulary is not None:
        raise WrongUse(f"data.vocabulary={vocabulary} is the size of a bpe tokenizer trained here, and "
                       f"data.tokenizer={kind} has its own; leave data.vocabulary out")
    smallest = BytePairTokenizer.SMALLEST_VOCABULARY
    if vocabulary is not None and vocabulary < smallest:
        raise WrongUse(f"data.vocabulary={vocabulary}: a bpe tokenizer needs 256 bytes and the end of text; "
                       f"use {smallest} or more")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`: one saved here, or any Hugging Face tokenizer. Raises WrongUse if there is none."""
    kind = marked_kind(folder)
    if kind == "char":
        return CharTokenizer.load(folder)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return BytePairTokenizer.load(folder)
    if kind in (None, "folder"):
        return FolderTokenizer.load(folder)
    raise WrongUse(f"{folder / MARKER} asks for the tokenizer {kind!r}, which this version does not know; "
                   f"it knows {', '.join(KINDS)} and folder")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest little-endian unsigned type for stored ids: uint16 up to 65536 tokens, else uint32."""
    return np.dtype("<u2") if vocabulary <= 2**16 else np.dtype("<u4")
