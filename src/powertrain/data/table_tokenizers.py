"""Tokenizers that are a table: one token per character, or one per byte. numpy does the work, on whole texts.

Saved, they are models of the `tokenizers` library that give the same ids: a WordLevel model over single characters,
and a byte-level BPE without merges. A marker beside the files names the kind of tokenizer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, write_json

END_OF_TEXT = "<|endoftext|>"
MARKER = "powertrain_tokenizer.json"


def write_marker(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MARKER, {"kind": kind})


def marked_kind(folder: Path) -> str | None:
    """Return the kind of tokenizer that was saved in `folder`, or None if it was not saved here."""
    path = folder / MARKER
    return str(read_json(path).get("kind")) if path.is_file() else None


def save_library_tokenizer(tokenizer: LibraryTokenizer, folder: Path, kind: str, end_of_text: str | None) -> None:
    """Write a folder that transformers.AutoTokenizer and load_tokenizer open."""
    write_marker(folder, kind)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # text that spells the end of text is text: the same ids as ours, also through transformers
        "split_special_tokens": True,
    }
    if end_of_text is not None:
        config["eos_token"] = end_of_text
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # its own `save` raises no OSError
    write_json(folder / "tokenizer_config.json", config)


# ------------------------------------------------------------------------------------------------ tables

CODE_POINT = np.dtype("<u4")                 # one character of UTF-32


@dataclass(frozen=True)
class CharTokenizer:
    """One token per character; the id is its rank among `characters`, then the end of text if there is one."""

    characters: str                          # distinct, sorted by code point
    with_end_of_text: bool

    kind = "char"

    @classmethod
    def of_texts(cls, texts: Iterable[str], with_end_of_text: bool) -> Self:
        distinct: set[str] = set()
        for text in texts:
            distinct.update(text)
        return cls("".join(sorted(distinct)), with_end_of_text)

    @classmethod
    def load(cls, folder: Path) -> Self:
        try:
            words = read_json(folder / "tokenizer.json")["model"]["vocab"]
            characters = sorted(word for word in words if len(word) == 1)
        except (KeyError, TypeError) as error:
            raise WrongUse(f"{folder / 'tokenizer.json'} holds no char tokenizer; save the tokenizer again") from error
        return cls("".join(characters), END_OF_TEXT in words)

    @property
    def vocabulary(self) -> int:
        return len(self.characters) + self.with_end_of_text

    @property
    def end_of_text(self) -> int | None:
        return len(self.characters) if self.with_end_of_text else None

    @cached_property
    def _code_points(self) -> npt.NDArray[np.uint32]:
        return _code_points(self.characters)

    @cached_property
    def _ids(self) -> npt.NDArray[np.int32]:
        """Return (1 + the highest code point + 1,) int32: the id of each code point, -1 where there is none."""
        highest = int(self._code_points.max(initial=0))
        ids = np.full(highest + 2, -1, dtype=np.int32)  # the last one stands for all that is higher
        ids[self._code_points] = np.arange(len(self.characters))
        return ids

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the ids (characters,) uint16 or uint32. Raises WrongUse at a character that the vocabulary lacks."""
        code_points = _code_points(text)
        ids = self._ids[np.minimum(code_points, len(self._ids) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            character = chr(code_points[unknown[0]])
            raise WrongUse(f"the character {character!r} (U+{ord(character):04X}) at position {unknown[0]} is not "
                           f"among the {len(self.characters)} characters this char tokenizer was made from; "
                           "leave it out, or train with data.tokenizer=byte or bpe")
        return ids.astype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [self.encode(text) for text in texts]

    def cut(self, text: str) -> list[str]:
        return [text, ""]                    # anywhere

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return END_OF_TEXT.join(self._code_points[part].tobytes().decode("utf-32-le", errors="surrogatepass")
                                for part in _between_ends(checked_ids(ids, self.vocabulary), self.end_of_text))

    def save(self, folder: Path) -> None:
        words = {character: rank for rank, character in enumerate(self.characters)}
        if self.with_end_of_text:
            words[END_OF_TEXT] = len(words)
        library = LibraryTokenizer(models.WordLevel(words, unk_token="<unk>"))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
        if self.with_end_of_text:
            library.add_special_tokens([END_OF_TEXT])
        save_library_tokenizer(library, folder, self.kind, END_OF_TEXT if self.with_end_of_text else None)


@dataclass(frozen=True)
class ByteTokenizer:
    """One token per byte of UTF-8: ids 0..255 are the bytes, 256 the end of text. It knows every text."""

    kind = "byte"
    vocabulary = 257
    end_of_text = 256

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the ids (UTF-8 bytes,) uint16. Raises WrongUse if `text` holds half a surrogate pair."""
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        return [self.encode(text) for text in texts]

    def cut(self, text: str) -> list[str]:
        return [text, ""]                    # anywhere

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text; bytes that are not UTF-8, as a model may write them, become U+FFFD."""
        parts = _between_ends(checked_ids(ids, self.vocabulary), self.end_of_text)
        return END_OF_TEXT.encode().join(part.astype(np.uint8).tobytes() for part in parts).decode(errors="replace")

    def save(self, folder: Path) -> None:
        words = {character: byte for byte, character in enumerate(_byte_characters())}
        words[END_OF_TEXT] = self.end_of_text
        library = LibraryTokenizer(models.BPE(vocab=words, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([END_OF_TEXT])
        save_library_tokenizer(library, folder, self.kind, END_OF_TEXT)


def utf8(text: str) -> bytes:
    """Return `text` in UTF-8. Raises WrongUse at half a surrogate pair, which no encoding has."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        if 0xdc80 <= (code := ord(text[error.start])) <= 0xdcff:         # as Python reads bytes that are no text
            raise WrongUse(f"the text is not UTF-8: byte 0x{code - 0xdc00:02x} at position {error.start}") from error
        raise WrongUse(f"the text holds the lone surrogate \\u{ord(text[error.start]):04x} at position {error.start}, "
                       "which is no character; remove it") from error


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=CODE_POINT)


def checked_ids(ids: Sequence[int] | npt.NDArray[Any], vocabulary: int) -> npt.NDArray[np.int64]:
    """Return `ids` as an array. Raises WrongUse if one is outside the vocabulary, as from a model with more rows than that."""
    array = np.asarray(ids, dtype=np.int64)
    outside = array[(array < 0) | (array >= vocabulary)]
    if len(outside):
        raise WrongUse(f"token {outside[0]} is outside this tokenizer's vocabulary of {vocabulary}; "
                       "use the tokenizer that the model was trained with")
    return array


def _between_ends(ids: npt.NDArray[np.int64], end_of_text: int | None) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the runs of ids before, between and after the ends of text."""
    start = 0
    for end in np.flatnonzero(ids == end_of_text) if end_of_text is not None else ():
        yield ids[start:end]
        start = int(end) + 1
    yield ids[start:]


def _byte_characters() -> list[str]:
    """Return the printable character that GPT-2's byte-level alphabet writes for each byte 0..255.

    Source: openai/gpt-2, src/encoder.py, bytes_to_unicode: printable Latin-1 stays, the rest moves to U+0100.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
