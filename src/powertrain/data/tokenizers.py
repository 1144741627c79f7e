"""Text to token ids and back: how a tokenizer is made or opened again, and the tokenizers that the library runs.

Ids are below a tokenizer's `vocabulary`; `end_of_text` follows each document, where there is one. `encode` never gives the id
of end_of_text for text that spells it, except in a folder tokenizer, which keeps its own rules. `decode` leaves special tokens
in the text.

`char` and `byte` are exact tables (table_tokenizers.py). `bpe` is trained here and a folder is anyone's Hugging Face tokenizer;
both run in the `tokenizers` library. Each saves to a folder that transformers.AutoTokenizer opens with equal ids.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from powertrain.data import table_tokenizers as tables
from powertrain.data.documents import in_batches
from powertrain.data.examples.trial import ends
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean, first_line
from powertrain.records.json_files import read_json

BPE_VOCABULARY, MOST_TOKENS = 4096, 2**25
KINDS = ("char", "byte", "bpe")


def make_tokenizer(kind: str, texts: Iterable[str], vocabulary: int | None = None, *, several: bool = False) -> "Tokenizer":
    """Return the tokenizer `kind`: "char" or "bpe" made from `texts`, "byte", or a folder that holds one.

    `several` says that the texts are of several documents, behind each of which a char tokenizer has an end of text.

    `vocabulary` is the size of a bpe trained here (default 4096); data with little variety may give fewer tokens.
    Raises WrongUse if the kind is unknown, the folder holds no tokenizer, or a vocabulary is asked of another kind.
    """
    check_tokenizer(kind, vocabulary)
    if kind == "char":
        return tables.CharTokenizer.of_texts(texts, with_end_of_text=several)
    if kind == "byte":
        return tables.ByteTokenizer()
    if kind == "bpe":
        return BytePairTokenizer.trained(texts, vocabulary or BPE_VOCABULARY)
    return load_tokenizer(Path(kind).expanduser())


def check_tokenizer(kind: str, vocabulary: int | None) -> None:
    """Raise WrongUse if no tokenizer of this kind and size can be made, without making it."""
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


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Return the tokenizer in `folder`: one saved here, or any Hugging Face tokenizer. Raises WrongUse if there is none."""
    kind = tables.marked_kind(folder)
    if kind == "char":
        return tables.CharTokenizer.load(folder)
    if kind == "byte":
        return tables.ByteTokenizer()
    if kind == "bpe":
        return BytePairTokenizer.load(folder)
    if kind in (None, "folder"):
        return FolderTokenizer.load(folder)
    raise WrongUse(f"{folder / tables.MARKER} asks for the tokenizer {kind!r}, which this version does not know; "
                   f"it knows {', '.join(KINDS)} and folder")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest little-endian unsigned type for stored ids: uint16 up to 65536 tokens, else uint32."""
    return np.dtype("<u2") if vocabulary <= 2**16 else np.dtype("<u4")


# ------------------------------------------------------------------------------------------------ the library's tokenizers

# of a text that is encoded as one piece: the library takes some 60 bytes for each character, and aborts where they are missing
LONGEST_PIECE_CHARS = 8 << 20
PIECE_CHARS = 50_000                         # of one document, so that all cores work on it
CONFIG, LEGACY_CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
# the files in which Hugging Face folders keep a tokenizer, beside files of weights
TOKENIZER_FILES = ("tokenizer.json", CONFIG, LEGACY_CONFIG, "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
                   TEMPLATE_FILE)
SENTENCEPIECE_GLOB = "*.model"
MODEL_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")  # one of these, or SENTENCEPIECE_GLOB, makes a tokenizer
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _LibraryTokenizer:
    """Ids through the library, in batches that bound the memory."""

    library: LibraryTokenizer

    @cached_property
    def vocabulary(self) -> int:
        # not the number of words: ids may have gaps, and the embedding needs a row for the highest
        return 1 + max(self.library.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Return the ids (tokens,) uint16 or uint32. Raises WrongUse if `text` holds half a surrogate pair."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        pieces = [(number, piece) for number, text in enumerate(texts) for piece in self.cut(text)]
        parts: list[list[npt.NDArray[Any]]] = [[] for _ in texts]
        dtype = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        for batch in in_batches(pieces, lambda piece: len(piece[1])):
            for (number, _), ids in zip(batch, self._encode_batch([piece for _, piece in batch]), strict=True):
                parts[number].append(np.array(ids, dtype=dtype))
        return [np.concatenate(part) if part else np.empty(0, dtype) for part in parts]

    def cut(self, text: str) -> list[str]:
        """Return the text in pieces that are encoded as within it, whatever comes behind: the last may go on there."""
        return [refuse_long(text)]

    def _encode_batch(self, texts: list[str]) -> Iterator[list[int]]:
        try:
            encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            for text in texts:
                tables.utf8(text)  # says where the half surrogate is
            raise
        return (encoding.ids for encoding in encodings)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return str(self.library.decode(tables.checked_ids(ids, self.vocabulary).tolist(), skip_special_tokens=False))


@dataclass(frozen=True, eq=False)
class BytePairTokenizer(_LibraryTokenizer):
    """Byte-level BPE: every text has ids, and they decode to it exactly. The end of text is id 0."""

    library: LibraryTokenizer

    kind = "bpe"
    end_of_text = 0
    SMALLEST_VOCABULARY: ClassVar[int] = 257

    def __post_init__(self) -> None:
        self.library.encode_special_tokens = True  # not kept in tokenizer.json

    @classmethod
    def trained(cls, texts: Iterable[str], vocabulary: int) -> Self:
        """Train on `texts`: equal texts give equal tokenizers, smaller than asked if no pair is left that repeats."""
        library = LibraryTokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, min_frequency=2, special_tokens=[tables.END_OF_TEXT], show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
        library.train_from_iterator((piece for text in texts for piece in exact_pieces(text)), trainer)
        return cls(library)

    @classmethod
    def load(cls, folder: Path) -> Self:
        return cls(_open_library(folder / "tokenizer.json"))

    def cut(self, text: str) -> list[str]:
        return exact_pieces(text)

    def save(self, folder: Path) -> None:
        tables.save_library_tokenizer(self.library, folder, self.kind, tables.END_OF_TEXT)


@dataclass(frozen=True, eq=False)
class FolderTokenizer(_LibraryTokenizer):
    """A Hugging Face tokenizer with its own rules, but no truncation, no padding and no tokens put around a text."""

    library: LibraryTokenizer
    end_of_text: int | None
    files: tuple[Path, ...]                  # all that makes the tokenizer; saving copies them

    kind = "folder"

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a folder's tokenizer. Raises WrongUse if it has none, or one that the `tokenizers` library cannot run."""
        files = tokenizer_files(folder)
        if not any(file.name in MODEL_FILES or file.match(SENTENCEPIECE_GLOB) for file in files):
            raise WrongUse(f"{folder} holds no tokenizer: none of {', '.join(MODEL_FILES)} or {SENTENCEPIECE_GLOB}; "
                           "give the folder that has its tokenizer.json with data.tokenizer=FOLDER, or copy that file there")
        saved = folder / "tokenizer.json"
        library = _open_library(saved) if saved in files else _converted(folder)
        library.no_truncation()
        library.no_padding()
        end = named_tokens(folder).get("eos_token")
        found = cls(library, None if end is None else library.token_to_id(end), files)
        if found.vocabulary > MOST_TOKENS:
            raise WrongUse(f"{folder} has a tokenizer of {found.vocabulary:,} tokens, and {MOST_TOKENS:,} are the most")
        if not ends(lambda: library.encode("It is a short text, of 9 words.\n")):
            raise WrongUse(f"{folder} has a tokenizer that takes seconds or a GiB for a short text; copy or download it again")
        return found

    @cached_property
    def digest(self) -> str:
        """Return the sha256 (hex) of all files that decide the ids."""
        return digest_files(self.files)

    def save(self, folder: Path) -> None:
        tables.write_marker(folder, self.kind)
        for file in self.files:
            if file.parent.resolve() != folder.resolve():
                shutil.copyfile(file, folder / file.name)


Tokenizer = tables.CharTokenizer | tables.ByteTokenizer | BytePairTokenizer | FolderTokenizer


def refuse_long(text: str) -> str:
    """Return the text. Raises WrongUse for one that is too long to be encoded as one piece."""
    if len(text) > LONGEST_PIECE_CHARS:
        raise WrongUse(f"a text has more than {LONGEST_PIECE_CHARS:,} characters without a place to cut it, and no more than "
                       "that are tokenised at once; break it into lines or documents, or use data.tokenizer=char or byte")
    return text


def exact_pieces(text: str) -> list[str]:
    """Cut `text` where byte-level BPE encodes the pieces as it encodes the whole.

    Its pattern cannot match across a newline that follows a character that is no white space: only the white-space
    alternatives match a newline, and they begin at white space. Where there is no such place, the text is not cut.
    Source: the GPT-2 pattern in tokenizers' ByteLevel, ` ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+` and its siblings.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE_CHARS:
        cut = text.find("\n", start + PIECE_CHARS)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.find("\n", cut + 1)
        if cut < 0:
            break
        pieces.append(refuse_long(text[start:cut]))
        start = cut
    return [*pieces, refuse_long(text[start:])]


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """Return the files in `folder` that make a tokenizer, sorted by name."""
    named = {folder / name for name in TOKENIZER_FILES} | set(folder.glob(SENTENCEPIECE_GLOB))
    return tuple(sorted(path for path in named if path.is_file()))


def digest_files(files: Iterable[Path]) -> str:
    """Return the sha256 (hex) of the names and contents of `files`."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def read_settings(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return a tokenizer's settings file, empty if the folder has none."""
    return read_json(folder / name) if (folder / name).is_file() else {}


def named_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that the folder's settings name: "eos_token" -> its text."""
    config, legacy = read_settings(folder), read_settings(folder, LEGACY_CONFIG)
    # transformers believes the older file, unless the newer one lists all added tokens
    order = (config, legacy) if "added_tokens_decoder" in config else (legacy, config)
    tokens = {role: next((settings[role] for settings in order if settings.get(role) is not None), None) for role in NAMED}
    found: dict[str, Any] = {role: token.get("content") if isinstance(token, dict) else token
                             for role, token in tokens.items() if token is not None}
    for role, token in found.items():
        if not isinstance(token, str) or token.encode(errors="replace").decode() != token:
            raise WrongUse(f"{folder} names the {role} {str(token)[:40]!a}, which is no text; copy or download {CONFIG} again")
    return found


def _open_library(path: Path) -> LibraryTokenizer:
    try:
        return LibraryTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WrongUse(f"{path} cannot be opened as a tokenizer: {error}; save the tokenizer again") from error


def _converted(folder: Path) -> LibraryTokenizer:
    """Return the tokenizer of a folder without tokenizer.json, from transformers, which converts the older formats."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        library = tokenizer.backend_tokenizer
    except Exception as error:  # a missing package, a damaged file, a class without a fast form: all mean the same here
        raise WrongUse(f"{folder} has no tokenizer.json, and transformers cannot convert what it has: {first_line(error)}; "
                       "save a fast tokenizer there with save_pretrained") from error
    assert isinstance(library, LibraryTokenizer), type(library)
    return library
