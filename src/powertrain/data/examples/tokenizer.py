"""The tokenizer of a pretrained model as its examples need it: the tokens around a text, the end token, the chat template.

Special tokens in a text are special here, also for the tokenizers made in table_tokenizers.py and for bpe: a rendered
conversation is full of them. Saved, transformers.AutoTokenizer gives the same ids, and its apply_chat_template the same text.

A token is trained if it starts in a trained place of the text, so a tokenised text tells where each token starts.
"""

import difflib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.data.examples.words import Ids, Pieces, Words, words_of
from powertrain.data.tokenizers import (
    CONFIG,
    LEGACY_CONFIG,
    LONGEST_PIECE_CHARS,
    TEMPLATE_FILE,
    FolderTokenizer,
    named_tokens,
    read_settings,
)
from powertrain.records import WrongUse
from powertrain.records.errors import first_line
from powertrain.records.json_files import read_json, write_json

Place = tuple[int, int]                      # start and stop, in characters or in tokens
PROBE = "a"                                  # any text: the tokens around it are those that the tokenizer adds


@dataclass(frozen=True, eq=False)
class ExampleTokenizer(FolderTokenizer):
    """A folder's tokenizer with its special tokens. `end_of_text` is the id of `end`."""

    end: str                                 # follows each turn or text
    named: Mapping[str, str]                 # "bos_token" -> "<s>", ..., as transformers hands them to a template
    before: str | None                       # the token in front of each text: the beginning of a sequence
    template: str | None = None              # saved as chat_template.jinja; None: the folder's own, if it has one
    changed: bool = False                    # `library` is no longer what the files hold

    @cached_property
    def is_added(self) -> npt.NDArray[np.bool_]:
        """Return a mask (vocabulary,) of the tokens that are cut out of a text before anything else is looked at."""
        added = np.zeros(self.vocabulary, dtype=np.bool_)
        added[list(self.library.get_added_tokens_decoder())] = True
        return added

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        return _added_texts(self.library)

    @cached_property
    def words(self) -> Words | None:
        """Return the encoder by words; None for a tokenizer of another kind."""
        return words_of(self.library)

    @cached_property
    def frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that stand before and after a single text."""
        before, behind = _around(self.library)
        first = None if self.before is None else self.library.token_to_id(self.before)
        return before if first in before else () if first is None else (first,), behind

    def tokenise(self, texts: Sequence[str]) -> "list[Tokenised | str]":
        """Return each text's tokens; where the tokenizer cannot encode a text, the reason."""
        long = {number: f"it has {len(text):,} characters; an example has at most {LONGEST_PIECE_CHARS:,}: divide it"
                for number, text in enumerate(texts) if len(text) > LONGEST_PIECE_CHARS}
        if long:
            found = iter(self.tokenise([text for number, text in enumerate(texts) if number not in long]))
            return [long[number] if number in long else next(found) for number in range(len(texts))]
        known: list[Pieces | None] = [None] * len(texts) if self.words is None else self.words.encode(texts)
        others = iter(self.offsets([text for text, pieces in zip(texts, known, strict=True) if pieces is None]))
        return [next(others) if pieces is None else pieces for pieces in known]

    def offsets(self, texts: Sequence[str]) -> "list[Tokenised | str]":
        """Tokenise as `tokenise` does, by the library alone, on all cores."""
        return [found if isinstance(found, str) else Offsets(text, found, self.is_added)
                for text, found in zip(texts, each_or_reason(self.library, texts, False), strict=True)]

    def save(self, folder: Path) -> None:
        """Write all files, with the end token and the template that the examples were made with."""
        super().save(folder)
        if self.changed or not (folder / "tokenizer.json").is_file():
            (folder / "tokenizer.json").write_text(self.library.to_str(pretty=True), encoding="utf-8")
        config = read_settings(folder) or {"tokenizer_class": "PreTrainedTokenizerFast"}
        config["eos_token"] = self.end
        config.pop("split_special_tokens", None)  # text that spells a special token is that token, as in training
        if self.template is not None:
            config.pop("chat_template", None)
            (folder / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")
        write_json(folder / CONFIG, config)
        if (folder / LEGACY_CONFIG).is_file():
            write_json(folder / LEGACY_CONFIG, {**read_json(folder / LEGACY_CONFIG), "eos_token": self.end})


def open_example_tokenizer(folder: Path, end_token: str | None = None, *, task: str = "causal") -> ExampleTokenizer:
    """Return the tokenizer in `folder`. `end_token` replaces the end token of its settings; spans may end in sep_token.

    Raises WrongUse if there is no tokenizer, it names no end, or the end is not in its vocabulary.
    """
    plain = FolderTokenizer.load(folder)
    named = named_tokens(folder)
    end = end_token or named.get("eos_token") or (named.get("sep_token") if task == "span" else None)
    if end is None:
        raise WrongUse(f"the tokenizer in {folder} has no end token (eos_token), so the end of an answer cannot be "
                       f"marked; choose one of its tokens and train with data.end_token=TOKEN{_candidates(plain.library)}")
    if plain.library.token_to_id(end) is None:
        asked = "data.end_token" if end_token else f"the eos_token of {folder}"
        raise WrongUse(f"{asked}={end} is not among the tokenizer's {plain.vocabulary:,} tokens"
                       f"{_candidates(plain.library, end)}; choose one of them with data.end_token=TOKEN")
    changed = _make_special(plain.library, [end, *named.values()])
    return ExampleTokenizer(plain.library, plain.library.token_to_id(end), plain.files, end, {**named, "eos_token": end},
                            _put_before(folder, plain.library, named), changed=changed)


def _make_special(library: LibraryTokenizer, texts: Sequence[str]) -> bool:
    """Have named tokens cut out of a text whole, as transformers does; return whether that changed the library."""
    known = _added_texts(library)
    news = [text for text in dict.fromkeys(texts) if text not in known and library.token_to_id(text) is not None]
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in news])
    return bool(news)


def _put_before(folder: Path, library: LibraryTokenizer, named: Mapping[str, str]) -> str | None:
    """Return the token that the tokenizer itself puts in front of a text. Its settings win over its post-processor."""
    config = read_settings(folder)
    if "add_bos_token" in config or "add_eos_token" in config:
        return named.get("bos_token") if config.get("add_bos_token") else None
    before, _ = _around(library)
    return str(library.id_to_token(before[0])) if before else None


def _added_texts(library: LibraryTokenizer) -> tuple[str, ...]:
    return tuple(token.content for token in library.get_added_tokens_decoder().values())


def _around(library: LibraryTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and behind a text."""
    try:
        bare = library.encode(PROBE, add_special_tokens=False).ids
        framed = library.encode(PROBE, add_special_tokens=True).ids
    except Exception as error:               # the library raises bare Exception
        raise WrongUse(f"the tokenizer cannot encode a text ({first_line(error)}); copy or download its files again") from None
    at = next((i for i in range(len(framed)) if framed[i:i + len(bare)] == bare), 0)
    return tuple(framed[:at]), tuple(framed[at + len(bare):])


def _candidates(library: LibraryTokenizer, near: str | None = None) -> str:
    texts: Sequence[str] = _added_texts(library)
    if near is not None:
        texts = difflib.get_close_matches(near, texts, n=3) or texts
    return f"; it has {', '.join(texts[:8])}" if texts else ""


# ------------------------------------------------------------------------------------------------ places of a text

@dataclass(frozen=True, eq=False)
class Offsets:
    """One text as the library encodes it, with the character where every token starts."""

    text: str
    encoding: Encoding
    is_added: npt.NDArray[np.bool_]          # (vocabulary,)

    @cached_property
    def ids(self) -> Ids:
        return np.array(self.encoding.ids, dtype=np.int64)

    def first_from(self, character: int) -> int:
        if character >= len(self.text):
            return len(self.encoding.ids)
        token = self.encoding.char_to_token(character)
        if token is not None and self._start(token) == character:
            return token
        return bisect_left([start for start, _ in self.encoding.offsets], character)

    def last_special(self, token: int) -> tuple[int, int] | None:
        special = np.flatnonzero(self.is_added[self.ids[:token]])
        return (int(special[-1]), self._start(int(special[-1]))) if len(special) else None

    def _start(self, token: int) -> int:
        place = self.encoding.token_to_chars(token)
        assert place is not None, token      # only tokens that the post-processor adds have none
        return int(place[0])


Tokenised = Pieces | Offsets                 # one text's ids; no added special tokens are among them


def places_of(found: Tokenised | str, trained: Sequence[Place]) -> list[Place] | None:
    """Return places of the text as ranges of its tokens: none for a text without tokens, None where `found` cannot tell."""
    places: list[Place] = []
    if isinstance(found, str):
        return places
    for start, stop in trained:
        first, last = found.first_from(start), found.first_from(stop)
        if first is None or last is None:
            return None
        places.append((first, last))
    return places


def each_or_reason(library: LibraryTokenizer, texts: Sequence[Any], special: bool) -> list[Encoding | str]:
    """Return the encoding of each text or pair of texts, or the reason why the library cannot encode it."""
    try:
        return list(library.encode_batch(list(texts), add_special_tokens=special))
    except Exception as error:  # the library raises bare Exception, and does not say for which text
        if len(texts) == 1:
            return [f"the tokenizer cannot encode it: {error}"]
        return [found for text in texts for found in each_or_reason(library, [text], special)]
