"""The token store: text tokenised once, memory-mapped ever after.

    <cache>/tokens/<key>/  train.bin, validation.bin   token ids, little-endian uint16 or uint32
                           tokenizer/  meta.json (last: the sizes of all the others)

The key is a digest of all that decides the content. A store appears by one rename, whole or not at all; a damaged one
is built again.

The text is read several times and never held: counted, split (splitting.py), a tokenizer made from it, encoded in batches.
"""

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.data import tokenizers
from powertrain.data.documents import Measured, Texts, in_batches
from powertrain.data.publishing import is_whole, key_of, mapped, publish, read_meta
from powertrain.data.shards import Piece as EncodedPiece
from powertrain.data.shards import PieceWriter, Shard, ShardedStore, publish_shard
from powertrain.data.splitting import Piece, Split, changed, runs_of, split_documents, whole_pieces
from powertrain.data.tokenizers import Tokenizer
from powertrain.recipe.schema import DataRecipe
from powertrain.records import WrongUse
from powertrain.shapes import length_quantiles

SIDES = ("train", "validation")              # the names of the files, without .bin
FORMAT = 2                                   # of the folder, and of all that decides its content: splits, bpe training
GZIP = 31                                    # zlib's number for a gzip stream


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
    texts = _texts(data, cache)
    key = _key(data, seed, texts)
    folder = cache / _folder_of(key)
    if not is_whole(folder):
        made = _made(data, seed, texts)
        publish(folder, lambda building: _build(building, made, key))
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
    texts = _texts(data, cache)
    key = _key(data, seed, texts)

    def write(writer: PieceWriter, shard: Shard) -> dict[str, Any]:
        made = _made(data, seed, texts)
        for batch in shard.own(_batches(made)):
            writer.append(*_encoded(batch, made))
        made.tokenizer.save(writer.folder / "tokenizer")
        return {"meta": _about(made, key)}

    store = ShardedStore(_folder_of(key), key, SIDES, write)
    return publish_shard([store], shard, {**data.model_dump(mode="json"), "seed": seed}, cache)


def _texts(data: DataRecipe, cache: Path) -> Texts:
    """Return the text of a recipe. Raises WrongUse if the recipe names no text or no tokenizer."""
    if not isinstance(data.source, str):
        raise WrongUse(f"data.source lists {len(data.source)} sources, and training from scratch reads one; name a folder or "
                       "a glob that holds them all")
    if data.shares is not None:
        raise WrongUse("data.shares mixes the examples of a pretrained model, and training from scratch reads one text; mix it "
                       "beforehand: powertrain data mix FILE SOURCE=SHARE SOURCE=SHARE --tokenizer MODEL")
    tokenizers.check_tokenizer(data.tokenizer, data.vocabulary)
    return Texts(data.source, cache, data.text_field, data.max_chars)


def _key(data: DataRecipe, seed: int, texts: Texts) -> dict[str, Any]:
    """Return all that decides the content of a store."""
    tokenizer, share = data.tokenizer, data.validation_share
    if tokenizer == "bpe":
        of_tokenizer: list[Any] = ["bpe", data.vocabulary or tokenizers.BPE_VOCABULARY]
    else:
        of_tokenizer = [tokenizer] if tokenizer in tokenizers.KINDS else \
            ["folder", tokenizers.digest_files(tokenizers.tokenizer_files(Path(tokenizer).expanduser()))]
    return {
        "format": FORMAT,
        "texts": texts.fingerprint(),
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

    texts: Texts
    measured: Measured
    split: Split
    tokenizer: Tokenizer


def _made(data: DataRecipe, seed: int, texts: Texts) -> Made:
    measured = texts.measured()
    split = split_documents(texts, measured, data.validation_share, data.validation_split, seed)
    # char must know every character, also one that only validates: it could not encode it otherwise.
    # bpe learns its merges from the training text, or the validation loss would profit from having seen the other text.
    learned = (text for validates, text, _ in whole_pieces(runs_of(texts, split), tokenizers.exact_pieces) if not validates) \
        if data.tokenizer == "bpe" else (piece for document in texts for piece in document.pieces())
    return Made(texts, measured, split, tokenizers.make_tokenizer(
        data.tokenizer, learned, data.vocabulary, several=measured.several))


def _build(folder: Path, made: Made, key: Mapping[str, Any]) -> dict[str, Any]:
    """Write all but meta.json into `folder`, and return its content."""
    with closing(TokenWriter(folder)) as writer:
        for batch in _batches(made):
            writer.append(*_encoded(batch, made))
    made.tokenizer.save(folder / "tokenizer")
    return writer.meta(_about(made, key))


def _about(made: Made, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a store besides its tokens: the beginning of its meta.json.

    Raises WrongUse if the text has changed since its key was made.
    """
    packer, validation_bytes, gzip_bytes = zlib.compressobj(9, wbits=GZIP), 0, 0
    for validates, text, _ in runs_of(made.texts, made.split):
        if validates:
            content = text.encode()
            validation_bytes, gzip_bytes = validation_bytes + len(content), gzip_bytes + len(packer.compress(content))
    if made.texts.fingerprint() != key["texts"]:
        raise changed(made.texts.source)
    return {
        "vocabulary": made.tokenizer.vocabulary,
        "digest": made.measured.digest,
        "documents": len(made.measured.characters),
        "characters": sum(made.measured.characters),
        "text_bytes": made.measured.text_bytes,
        "validation_bytes": validation_bytes,
        "validation_text_gzip_bytes": gzip_bytes + len(packer.flush()),
    }


def _batches(made: Made) -> Iterator[list[Piece]]:
    """Yield all text in order, in batches of pieces that are encoded together."""
    return in_batches(whole_pieces(runs_of(made.texts, made.split), made.tokenizer.cut), lambda piece: len(piece[1]))


def _encoded(batch: Sequence[Piece], made: Made) -> EncodedPiece:
    """Return the tokens of a batch; an end of text follows each run of text if the source has several documents."""
    dtype, end_of_text = tokenizers.token_dtype(made.tokenizer.vocabulary), made.tokenizer.end_of_text
    end = np.array([end_of_text] if made.measured.several and end_of_text is not None else [], dtype=dtype)
    content, lengths, is_open = {side: bytearray() for side in SIDES}, list[int](), False
    for (validates, _, is_last), ids in zip(batch, made.tokenizer.encode_many([text for _, text, _ in batch]), strict=True):
        tokens = np.concatenate([ids.astype(dtype, copy=False), end]) if is_last else ids.astype(dtype, copy=False)
        content[SIDES[validates]] += tokens.tobytes()
        if not validates:
            if is_open:
                lengths[-1] += len(tokens)
            else:
                lengths.append(len(tokens))
            is_open = not is_last
    return {side: bytes(tokens) for side, tokens in content.items()}, {"lengths": lengths, "open": is_open}


class TokenWriter:
    """The files of one store, and how many tokens each run of training text has, its end of text included."""

    def __init__(self, folder: Path):
        self.files = {side: (folder / f"{side}.bin").open("wb") for side in SIDES}
        self.lengths = array("q")
        self.is_open = False                 # the last run goes on in the next batch

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def append(self, files: Mapping[str, bytes], told: Mapping[str, Any]) -> None:
        for side, content in files.items():
            self.files[side].write(content)
        lengths = list(told["lengths"])
        if self.is_open and lengths:
            self.lengths[-1] += lengths.pop(0)
        self.lengths.extend(lengths)
        self.is_open = told["open"] if told["lengths"] else self.is_open

    def meta(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of meta.json: what is known `about` the store beforehand, and what was counted."""
        return {**about, "length_quantiles": length_quantiles(self.lengths)}
