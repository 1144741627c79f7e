"""The token store: text tokenised once, memory-mapped ever after.

    <cache>/tokens/<key>/  train.bin, validation.bin   token ids, little-endian uint16 or uint32
                           tokenizer/  meta.json (last: the sizes of all the others)

The key is a digest of all that decides the content. A store appears by one rename, whole or not at all; a damaged one
is built again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.data.documents import Document, digest_documents, in_batches
from powertrain.data.library_tokenizers import digest_files, tokenizer_files
from powertrain.data.publishing import is_whole, publish, read_meta
from powertrain.data.reading import read_documents
from powertrain.data.splitting import Split, SplitKind, split_documents
from powertrain.data.tokenizers import (
    BPE_VOCABULARY,
    KINDS,
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    make_tokenizer,
    token_dtype,
)
from powertrain.shapes import length_quantiles

FORMAT = 1                                   # of the folder, and of all that decides its content: splits, bpe training


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Memory-mapped tokens of both sides, their tokenizer, and what was counted when they were written."""

    folder: Path
    train: npt.NDArray[Any]                  # (tokens,) uint16 or uint32, read-only
    validation: npt.NDArray[Any]             # (tokens,) likewise
    tokenizer: Tokenizer
    source: str
    digest: str                              # sha256 of the documents
    documents: int                           # of the source, before any was cut by the split
    characters: int
    text_bytes: int                          # UTF-8
    validation_bytes: int                    # UTF-8
    validation_text_gzip_bytes: int          # of the validation text at gzip's level 9
    length_quantiles: dict[str, int]         # tokens per training document: min, p10, p50, p90, max


def open_store(source: str, *, tokenizer: str, vocabulary: int | None, text_field: str, max_chars: int | None,
               validation_share: float, validation_split: SplitKind, seed: int, cache: Path) -> TokenStore:
    """The tokens of `source`, built into `cache` if they are not there yet. The arguments are the recipe's data keys.

    Where the source has several documents and the tokenizer an end of text, it follows each document.
    Raises WrongUse if the source, the tokenizer or the split cannot be used, or `cache` cannot be written.
    """
    check_tokenizer(tokenizer, vocabulary)
    documents = read_documents(source, cache=cache, text_field=text_field, max_chars=max_chars)
    digest = digest_documents(documents)
    seeded = validation_split == "seeded" and validation_share > 0
    folder = cache / "tokens" / _key({
        "format": FORMAT,
        "documents": digest,
        "text_field": text_field,
        "max_chars": max_chars,
        "tokenizer": _tokenizer_key(tokenizer, vocabulary),
        "validation": [validation_share, validation_split, seed if seeded else None],
    })
    if not is_whole(folder):
        split = split_documents(documents, validation_share, validation_split, seed)
        # char must know every character, also one that only validates: it could not encode it otherwise.
        # bpe learns its merges from what trains, or the validation loss would profit from having seen the text.
        made = make_tokenizer(tokenizer, split.train if tokenizer == "bpe" else documents, vocabulary)
        publish(folder, lambda building: _build(building, documents, digest, split, made))
    return _opened(folder, source)


def _key(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _tokenizer_key(tokenizer: str, vocabulary: int | None) -> list[Any]:
    if tokenizer == "bpe":
        return ["bpe", vocabulary or BPE_VOCABULARY]
    if tokenizer in KINDS:
        return [tokenizer]
    return ["folder", digest_files(tokenizer_files(Path(tokenizer).expanduser()))]


def _build(folder: Path, documents: Sequence[Document], digest: str, split: Split,
           tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes all but meta.json into `folder`, and returns what goes there."""
    end_of_text = tokenizer.end_of_text if len(documents) > 1 else None
    lengths = _write_tokens(folder / "train.bin", split.train, tokenizer, end_of_text)
    _write_tokens(folder / "validation.bin", split.validation, tokenizer, end_of_text)
    validation = "".join(document.text for document in split.validation).encode()
    tokenizer.save(folder / "tokenizer")
    return {
        "vocabulary": tokenizer.vocabulary,
        "digest": digest,
        "documents": len(documents),
        "characters": sum(len(document.text) for document in documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
        "validation_bytes": len(validation),
        "validation_text_gzip_bytes": len(gzip.compress(validation, 9, mtime=0)),
        "length_quantiles": length_quantiles(lengths),
    }


def _write_tokens(path: Path, documents: Sequence[Document], tokenizer: Tokenizer,
                  end_of_text: int | None) -> list[int]:
    """Writes the documents' tokens end to end, and returns how many each has, its end of text included."""
    dtype = token_dtype(tokenizer.vocabulary)
    end = np.array([] if end_of_text is None else [end_of_text], dtype=dtype)
    lengths = []
    with path.open("wb") as file:
        for batch in in_batches(documents, lambda document: len(document.text)):
            for ids in tokenizer.encode_many([document.text for document in batch]):
                file.write(ids.astype(dtype, copy=False).tobytes() + end.tobytes())
                lengths.append(len(ids) + len(end))
    return lengths


def _opened(folder: Path, source: str) -> TokenStore:
    meta = read_meta(folder)
    dtype = token_dtype(meta["vocabulary"])
    return TokenStore(
        folder=folder,
        train=_mapped(folder / "train.bin", dtype),
        validation=_mapped(folder / "validation.bin", dtype),
        tokenizer=load_tokenizer(folder / "tokenizer"),
        source=source,
        **{name: meta[name] for name in ("digest", "documents", "characters", "text_bytes", "validation_bytes",
                                         "validation_text_gzip_bytes", "length_quantiles")},
    )


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
