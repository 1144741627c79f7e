"""Texts to ids, and the tokens at places of a text: by the words that are known, else by the tokenizer's own offsets.

A token is trained if it starts in a trained place of the text; so what is asked of a text is where a token starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.data.examples.templates import Place
from powertrain.data.examples.tokenizer import ExampleTokenizer

Ids = npt.NDArray[np.int64]


class Tokenised(Protocol):
    """One text's ids; no added special tokens are among them."""

    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> Ids: ...

    def first_from(self, character: int) -> int | None:
        """The first token that starts at `character` or later; None where this cannot tell."""
        ...

    def last_special(self, token: int) -> tuple[int, int] | None:
        """Token and character of the last added token before `token`."""
        ...


@dataclass(frozen=True, eq=False)
class Offsets:
    """One text as the library encodes it: it always can tell."""

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


def tokenise(tokenizer: ExampleTokenizer, texts: Sequence[str]) -> list[Tokenised | str]:
    """Each text's tokens; where the tokenizer cannot encode it, its reason."""
    if tokenizer.words is None:
        return offsets(tokenizer, texts)
    found: list[Tokenised | str] = []
    known = tokenizer.words.encode(texts)
    others = iter(offsets(tokenizer, [text for text, pieces in zip(texts, known, strict=True) if pieces is None]))
    for pieces in known:
        found.append(next(others) if pieces is None else pieces)
    return found


def offsets(tokenizer: ExampleTokenizer, texts: Sequence[str]) -> list[Tokenised | str]:
    """The same by the library alone, on all cores."""
    return [found if isinstance(found, str) else Offsets(text, found, tokenizer.is_added)
            for text, found in zip(texts, each_or_reason(tokenizer.library, texts, False), strict=True)]


def places_of(found: Tokenised, trained: Sequence[Place]) -> list[Place] | None:
    """Places of the text as ranges of its tokens; None where `found` cannot tell."""
    places: list[Place] = []
    for start, stop in trained:
        first, last = found.first_from(start), found.first_from(stop)
        if first is None or last is None:
            return None
        places.append((first, last))
    return places


def each_or_reason(library: LibraryTokenizer, texts: Sequence[Any], special: bool) -> list[Encoding | str]:
    if not texts:
        return []
    try:
        return list(library.encode_batch(list(texts), add_special_tokens=special))
    except Exception:  # the library raises bare Exception, and does not say for which text
        return [_one_or_reason(library, text, special) for text in texts]


def _one_or_reason(library: LibraryTokenizer, text: Any, special: bool) -> Encoding | str:
    try:
        return library.encode_batch([text], add_special_tokens=special)[0]
    except Exception as error:
        return f"the tokenizer cannot encode it: {error}"
