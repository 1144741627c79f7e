"""The token store: text tokenised once, memory-mapped ever after.

    <cache>/tokens/<key>/  train.bin, validation.bin   token ids, little-endian uint16 or uint32
                           tokenizer/  meta.json (last: the sizes of all the others)

The key is a digest of all that decides the content. A store appears by one rename, whole or not at all; a damaged one
is built again.

No text both trains and validates, also where documents repeat. A `seeded` split draws whole documents if there are enough of
them, else spans of text; a `tail` split takes the end of the text, as nanoGPT does.
Source: karpathy/nanoGPT, data/shakespeare_char/prepare.py (train = data[:int(n * 0.9)]).
"""

from __future__ import annotations

import gzip
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from powertrain.data import tokenizers
from powertrain.data.documents import Document, digest_documents, in_batches, read_documents
from powertrain.data.order import draw_share
from powertrain.data.publishing import is_whole, key_of, mapped, publish, read_meta
from powertrain.data.shards import Piece, PieceWriter, Shard, ShardedStore, publish_shard
from powertrain.data.tokenizers import Tokenizer
from powertrain.recipe.schema import DataRecipe
from powertrain.records import WrongUse
from powertrain.shapes import length_quantiles

SplitKind = Literal["seeded", "tail"]
Span = tuple[int, int]                       # start and stop, in characters

SIDES = ("train", "validation")              # the names of the files, without .bin
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


def open_store(data: DataRecipe, *, seed: int, cache: Path) -> TokenStore:
    """Return the tokens of a recipe's text, built into `cache` if they are not there yet.

    Where the source has several documents and the tokenizer an end of text, it follows each document.
    Raises WrongUse if the source, the tokenizer or the split cannot be used, or `cache` cannot be written.
    """
    documents = _documents(data, cache)
    key = _key(data, seed, documents)
    folder = cache / _folder_of(key)
    if not is_whole(folder):
        made = _made(data, seed, documents)
        publish(folder, lambda building: _build(building, documents, key["documents"], made))
    meta = read_meta(folder)
    dtype = tokenizers.token_dtype(meta["vocabulary"])
    return TokenStore(
        folder=folder, train=mapped(folder / "train.bin", dtype), validation=mapped(folder / "validation.bin", dtype),
        tokenizer=tokenizers.load_tokenizer(folder / "tokenizer"), source=data.sources[0],
        **{name: meta[name] for name in ("digest", "documents", "characters", "text_bytes", "validation_bytes",
                                         "validation_text_gzip_bytes", "length_quantiles")})


def shard_text(data: DataRecipe, shard: Shard, *, seed: int, cache: Path) -> Path:
    """Return the folder of one shard of a recipe's tokens, for `join_shards`. Raises WrongUse as `open_store` does.

    Each machine reads all of the text, splits it and makes the tokenizer, as one machine would; only encoding is shared.
    """
    documents = _documents(data, cache)
    key = _key(data, seed, documents)

    def write(writer: PieceWriter, shard: Shard) -> dict[str, Any]:
        made = _made(data, seed, documents)
        for side, batch in shard.own(_batches(made.split)):
            writer.append(*_encoded(side, batch, made, several=len(documents) > 1))
        made.tokenizer.save(writer.folder / "tokenizer")
        return {"meta": _about(documents, key["documents"], made)}

    store = ShardedStore(_folder_of(key), key, SIDES, write)
    return publish_shard([store], shard, {**data.model_dump(mode="json"), "seed": seed}, cache)


def _documents(data: DataRecipe, cache: Path) -> list[Document]:
    """Return the text of a recipe. Raises WrongUse if the recipe names no text or no tokenizer."""
    if not isinstance(data.source, str):
        raise WrongUse(f"data.source lists {len(data.source)} sources, and training from scratch reads one; name a folder or "
                       "a glob that holds them all")
    if data.shares is not None:
        raise WrongUse("data.shares mixes the examples of a pretrained model, and training from scratch reads one text; mix it "
                       "beforehand: powertrain data mix FILE SOURCE=SHARE SOURCE=SHARE --tokenizer MODEL")
    tokenizers.check_tokenizer(data.tokenizer, data.vocabulary)
    return read_documents(data.source, cache=cache, text_field=data.text_field, max_chars=data.max_chars)


def _key(data: DataRecipe, seed: int, documents: Sequence[Document]) -> dict[str, Any]:
    """Return all that decides the content of a store."""
    tokenizer, share = data.tokenizer, data.validation_share
    if tokenizer == "bpe":
        of_tokenizer: list[Any] = ["bpe", data.vocabulary or tokenizers.BPE_VOCABULARY]
    else:
        of_tokenizer = [tokenizer] if tokenizer in tokenizers.KINDS else \
            ["folder", tokenizers.digest_files(tokenizers.tokenizer_files(Path(tokenizer).expanduser()))]
    return {
        "format": FORMAT,
        "documents": digest_documents(documents),
        "text_field": data.text_field,
        "max_chars": data.max_chars,
        "tokenizer": of_tokenizer,
        "validation": [share, data.validation_split, seed if data.validation_split == "seeded" and share > 0 else None],
    }


def _folder_of(key: Mapping[str, Any]) -> str:
    return f"tokens/{key_of(key)}"


@dataclass(frozen=True)
class Made:
    """What all of the text decides: its two sides, and the tokenizer."""

    split: Split
    tokenizer: Tokenizer


def _made(data: DataRecipe, seed: int, documents: Sequence[Document]) -> Made:
    split = split_documents(documents, data.validation_share, data.validation_split, seed)
    # char must know every character, also one that only validates: it could not encode it otherwise.
    # bpe learns its merges from the training text, or the validation loss would profit from having seen the other text.
    of_tokenizer = split.train if data.tokenizer == "bpe" else documents
    return Made(split, tokenizers.make_tokenizer(data.tokenizer, of_tokenizer, data.vocabulary))


def _build(folder: Path, documents: Sequence[Document], digest: str, made: Made) -> dict[str, Any]:
    """Write all but meta.json into `folder`, and return its content."""
    with closing(TokenWriter(folder)) as writer:
        for side, batch in _batches(made.split):
            writer.append(*_encoded(side, batch, made, several=len(documents) > 1))
    made.tokenizer.save(folder / "tokenizer")
    return writer.meta(_about(documents, digest, made))


def _about(documents: Sequence[Document], digest: str, made: Made) -> dict[str, Any]:
    """Return what is known of a store before its tokens: the beginning of its meta.json."""
    validation = "".join(document.text for document in made.split.validation).encode()
    return {
        "vocabulary": made.tokenizer.vocabulary,
        "digest": digest,
        "documents": len(documents),
        "characters": sum(len(document.text) for document in documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
        "validation_bytes": len(validation),
        "validation_text_gzip_bytes": len(gzip.compress(validation, 9, mtime=0)),
    }


def _batches(split: Split) -> Iterator[tuple[str, list[Document]]]:
    """Yield the documents of both sides in order, with the name of their side."""
    for side, documents in zip(SIDES, (split.train, split.validation), strict=True):
        for batch in in_batches(documents, lambda document: len(document.text)):
            yield side, batch


def _encoded(side: str, batch: Sequence[Document], made: Made, *, several: bool) -> Piece:
    """Return the tokens of documents; an end of text follows each if the source has several documents."""
    dtype, end_of_text = tokenizers.token_dtype(made.tokenizer.vocabulary), made.tokenizer.end_of_text
    end = np.array([end_of_text] if several and end_of_text is not None else [], dtype=dtype)
    encoded = made.tokenizer.encode_many([document.text for document in batch])
    content = b"".join(ids.astype(dtype, copy=False).tobytes() + end.tobytes() for ids in encoded)
    return {side: content}, {"lengths": [len(ids) + len(end) for ids in encoded]}


class TokenWriter:
    """The files of one store, and how many tokens each training document has, its end of text included."""

    def __init__(self, folder: Path):
        self.files = {side: (folder / f"{side}.bin").open("wb") for side in SIDES}
        self.lengths = array("q")

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def append(self, files: Mapping[str, bytes], told: Mapping[str, Any]) -> None:
        for side, content in files.items():
            self.files[side].write(content)
            if side == "train":
                self.lengths.extend(told["lengths"])

    def meta(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of meta.json: what is known `about` the store beforehand, and what was counted."""
        return {**about, "length_quantiles": length_quantiles(self.lengths)}


# ------------------------------------------------------------------------------------------------ training and validation

ENOUGH_DOCUMENTS = 20                        # distinct ones; with fewer, one of them is too large a share of the text
SPANS = 100                                  # so that a share can be met to about 1 %


@dataclass(frozen=True)
class Split:
    """Both sides in the order of the source. A text that was cut gives a document for each contiguous run."""

    train: list[Document]
    validation: list[Document]


def split_documents(documents: Sequence[Document], share: float, kind: SplitKind, seed: int) -> Split:
    """Hold out about `share` (0..1) of the characters. `seed` decides a seeded split; share 0 holds out nothing.

    Raises WrongUse if the text is too short to be split so.
    """
    if not 0 <= share < 1:
        raise WrongUse(f"data.validation_share={share:g} is not a share; use 0 or more, and less than 1")
    if share == 0:
        return Split(list(documents), [])
    split = _tail(documents, share) if kind == "tail" else _seeded(documents, share, seed)
    if not split.train or not split.validation:
        characters = sum(len(document.text) for document in documents)
        empty = "validation" if split.train else "training"
        raise WrongUse(f"data.validation_share={share:g} of {characters} characters leaves no {empty} text; "
                       "give more text, or set data.validation_share=0")
    return split


def _tail(documents: Sequence[Document], share: float) -> Split:
    """Train on the first int(n * (1 - share)) of all n characters; the document at the border is cut."""
    left = int(sum(len(document.text) for document in documents) * (1 - share))
    split = Split([], [])
    for document in documents:
        head, rest = document.text[:left], document.text[left:]
        left -= len(head)
        if head:
            split.train.append(Document(head, document.origin))
        if rest:
            split.validation.append(Document(rest, document.origin))
    return split


def _seeded(documents: Sequence[Document], share: float, seed: int) -> Split:
    copies = Counter(document.text for document in documents)  # repeated documents are drawn as one
    span_chars = max(1, sum(map(len, copies)) // SPANS)
    whole = len(copies) >= ENOUGH_DOCUMENTS
    spans = {text: [(0, len(text))] if whole else list(itertools.pairwise([0, *_cuts(text, span_chars), len(text)]))
             for text in copies}
    units = [(text, span) for text in spans for span in spans[text]]
    characters = [(stop - start) * copies[text] for text, (start, stop) in units]
    drawn = {units[number] for number in draw_share(characters, share, seed)}
    split = Split([], [])
    for document in documents:
        for is_drawn, (start, stop) in _runs(document.text, spans[document.text], drawn):
            (split.validation if is_drawn else split.train).append(Document(document.text[start:stop], document.origin))
    return split


def _runs(text: str, spans: Sequence[Span], drawn: set[tuple[str, Span]]) -> Iterator[tuple[bool, Span]]:
    """Join neighbouring spans of `text` that are on the same side; yield each run with whether it was drawn."""
    for is_drawn, group in itertools.groupby(spans, lambda span: (text, span) in drawn):
        run = list(group)
        yield is_drawn, (run[0][0], run[-1][1])


def _cuts(text: str, span_chars: int) -> Iterator[int]:
    """Yield a cut after about `span_chars`, behind the line's end if the line ends within another `span_chars`."""
    cut = span_chars
    while cut < len(text):
        newline = text.find("\n", cut - 1, cut + span_chars)
        cut = newline + 1 if newline >= 0 else cut
        if cut < len(text):
            yield cut
        cut += span_chars
