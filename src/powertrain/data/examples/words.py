"""Texts to token ids by their words, each of which the library encodes once.

Byte-level tokenizers cut a text at its added tokens, then by a pattern into words, and encode each word by itself. So the ids
of a text are those of its words, and most words of a text have occurred before: looking them up costs a quarter of encoding
them again. The pattern is the tokenizer's own, with its classes of characters spelled out for Python's `re`. A text with a
character whose class might differ between versions of Unicode is left to the library, and so is a tokenizer whose rules are
not of this kind. The first texts are encoded both ways, and after a difference all texts are left to the library.

Source of the scheme: tokenizers' pipeline, https://huggingface.co/docs/tokenizers/pipeline
"""

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from typing import Any
from unicodedata import category, normalize

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as LibraryTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # of ByteLevel(use_regex=True)
DIGITS = r"\p{N}"
MOST_REMEMBERED = 1 << 20    # characters of words, each of them some 30 bytes; then it begins anew
COMPARED = 32                # texts that the library encodes too, to check this encoder

# Code points whose class Unicode has not changed since version 6: Latin to Cyrillic, punctuation, signs, Japanese, Chinese
KNOWN = ((0x00, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x2000, 0x206F), (0x20A0, 0x20B8), (0x2190, 0x22FF),
         (0x3000, 0x30FF), (0x4E00, 0x9FA5), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F))
SPACES = {*"\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B))}      # White_Space
CASELESS = {"\u0130", "\u0131", "\u017f"}    # that (?i:...) takes for i or s, or not, as the library pleases


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """One text's ids, and where its words begin."""

    text: str
    ids: Ids
    characters: npt.NDArray[np.int64]        # where each word begins, in characters
    tokens: npt.NDArray[np.int64]            # and in tokens
    special: list[int]                       # the words that are added tokens

    def first_from(self, character: int) -> int | None:
        """Return the first token that starts at `character` or later.

        None if no word begins at `character`, or the word begins with a space: then the library's offsets must be asked.
        """
        if character >= len(self.text):
            return len(self.ids)
        word = int(self.characters.searchsorted(character))
        begins = word < len(self.characters) and self.characters[word] == character and self.text[character] != " "
        return int(self.tokens[word]) if begins else None

    def last_special(self, token: int) -> tuple[int, int] | None:
        """Return token and character of the last added token before `token`."""
        word = int(self.tokens.searchsorted(token))
        place = bisect_left(self.special, word)
        if place == 0:
            return None
        found = self.special[place - 1]
        return int(self.tokens[found]), int(self.characters[found])


class Words(dict[str, int]):
    """The words of one tokenizer: word -> its number, given at the first look-up; the columns hold each number's ids."""

    def __init__(self, library: LibraryTokenizer, pattern: str, *, composed: bool):
        self.library, self.composed = library, composed
        added = sorted((token.content for token in library.get_added_tokens_decoder().values() if token.content),
                       key=len, reverse=True)            # of two that begin alike the library takes the longer one
        self.added, self.added_ids = frozenset(added), frozenset(library.get_added_tokens_decoder())
        self.cut_added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None
        self.narrow = re.compile(spelled_out(pattern, _classes(128, composed)) or "")
        self.wide = re.compile(spelled_out(pattern, _classes(0x110000, composed)) or "")
        self.trusted, self.compared = True, False
        self._forget()

    def _forget(self) -> None:
        self.clear()
        self.remembered = 0
        self.ids, self.begins, self.token_counts, self.lengths = (array("q") for _ in range(4))

    def __missing__(self, word: str) -> int:
        ids = self.library.encode(word, add_special_tokens=False).ids
        if word not in self.added and not self.added_ids.isdisjoint(ids):
            self.trusted = False             # a plain word has the id of an added token: special tokens would be found wrongly
        self.begins.append(len(self.ids))
        self.ids.extend(ids)
        self.token_counts.append(len(ids))
        self.lengths.append(len(word))
        self.remembered += len(word)
        self[word] = number = len(self.lengths) - 1
        return number

    def encode(self, texts: Sequence[str]) -> list[Pieces | None]:
        """Return the pieces of each text; None for a text that is left to the library."""
        if not self.compared and texts:
            self.compared = True
            self._compare(texts[:COMPARED])
        if not self.trusted:
            return [None] * len(texts)
        if self.remembered > MOST_REMEMBERED:
            self._forget()
        found = [self._words(text) for text in texts]
        pieces = self._pieces(texts, found)
        return pieces if self.trusted else [None] * len(texts)

    def _compare(self, texts: Sequence[str]) -> None:
        for text, pieces in zip(texts, self._pieces(texts, [self._words(text) for text in texts]), strict=True):
            if pieces is not None and pieces.ids.tolist() != self.library.encode(text, add_special_tokens=False).ids:
                self.trusted = False

    def _words(self, text: str) -> tuple[list[str], list[int]] | None:
        """Return the words of a text, and which of them are added tokens."""
        pattern = self.narrow
        if not text.isascii():
            if _unknown(self.composed).search(text):
                return None
            pattern = self.wide
        parts = [text] if self.cut_added is None else self.cut_added.split(text)
        words: list[str] = pattern.findall(parts[0]) if parts[0] else []
        special: list[int] = []
        for place in range(1, len(parts), 2):
            special.append(len(words))
            words.append(parts[place])
            if parts[place + 1]:
                words += pattern.findall(parts[place + 1])
        return words, special

    def _pieces(self, texts: Sequence[str], found: Sequence[tuple[list[str], list[int]] | None]) -> list[Pieces | None]:
        """Look up the words of all texts at once, and sum their lengths."""
        counts = [0 if words is None else len(words[0]) for words in found]
        every = chain.from_iterable(words[0] for words in found if words is not None)
        numbers = np.fromiter(map(self.__getitem__, every), np.int64, sum(counts))
        begins, token_counts, lengths = (np.frombuffer(column, np.int64).take(numbers) if len(column) else numbers
                                         for column in (self.begins, self.token_counts, self.lengths))
        token_stops, character_stops = token_counts.cumsum(), lengths.cumsum()
        tokens, characters = token_stops - token_counts, character_stops - lengths
        total = int(token_stops[-1]) if len(token_stops) else 0
        ids = np.empty(0, np.int64)
        if total:
            ids = np.frombuffer(self.ids, np.int64).take(np.repeat(begins - tokens, token_counts) + np.arange(total))
        result: list[Pieces | None] = []
        word = token = character = 0
        for text, words, count in zip(texts, found, counts, strict=True):
            if words is None:
                result.append(None)
                continue
            stop = word + count
            token_stop = int(token_stops[stop - 1]) if stop else 0
            piece = Pieces(text, ids[token:token_stop], characters[word:stop] - character, tokens[word:stop] - token, words[1])
            character_stop = int(character_stops[stop - 1]) if stop else 0
            # where the pattern leaves characters out, the library encodes them too, so the text is left to it
            result.append(piece if character_stop - character == len(text) else None)
            word, token, character = stop, token_stop, character_stop
        return result


# ------------------------------------------------------------------------------------------------ whether it can be done


def words_of(library: LibraryTokenizer) -> Words | None:
    """Return the encoder by words; None if the tokenizer's rules do not split a text into words in a known way."""
    settings = json.loads(library.to_str())
    normalizer = settings.get("normalizer")
    composed = normalizer is not None
    parting = find_parting(settings.get("pre_tokenizer"))
    pattern = parting[0] if parting and len(parting) == 1 else None
    plain_model = settings["model"].get("type") == "BPE" and not settings["model"].get("dropout")
    plain_added = not any(token["lstrip"] or token["rstrip"] or token["single_word"]
                          for token in settings.get("added_tokens", ()))
    if (pattern is None or not plain_model or not plain_added or library.encode_special_tokens or library.truncation
            or library.padding or (composed and normalizer != {"type": "NFC"})
            or spelled_out(pattern, _classes(0x110000, composed)) is None):
        return None
    return Words(library, pattern, composed=composed)


def find_parting(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Return the regular expressions that split text, one after the other, before bytes are encoded; None for other rules."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = [step["type"] if step else None for step in steps]
    found: list[str] = []
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert") and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        elif kind == "Digits" and step["individual_digits"]:
            found.append(DIGITS)
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            found += [GPT2] if step.get("use_regex", True) else []
        else:
            return None
    return tuple(found) if kinds[-1:] == ["ByteLevel"] else None


# ------------------------------------------------------------------------------------------------ its pattern


ALIKE = (r"\S", r"\r", r"\n", r"\t", "(?i:", "(?:", "(?!")      # in both languages

Classes = tuple[str, str, str]               # the insides of three character classes: letters, numbers, spaces


def spelled_out(pattern: str, classes: Classes) -> str | None:
    r"""Return a pattern of the library (Oniguruma) for Python: \p{L}, \p{N} and \s written as characters.

    None if it has anything that the two might read differently.
    """
    inside, out, at = False, [], 0
    named = dict(zip((r"\p{L}", r"\p{N}", r"\s"), classes, strict=True))
    while at < len(pattern):
        token = next((name for name in (*named, *ALIKE) if pattern.startswith(name, at)), pattern[at])
        at += len(token)
        if token in named:
            out.append(named[token] if inside else f"[{named[token]}]")
        elif token == r"\S" and not inside:
            out.append(f"[^{classes[2]}]")
        elif (token in ("\\", r"\S") or (token in "[&" if inside else token in "^$.")
              or (token == "(" and pattern.startswith("?", at)) or (token == "}" and pattern.startswith("+", at))):
            return None
        else:
            inside = token == "[" or (inside and token != "]")
            out.append(token)
    return "".join(out)


@lru_cache(maxsize=4)
def _classes(below: int, composed: bool) -> Classes:
    characters = [character for character in _alphabet(composed) if ord(character) < below]
    letters, numbers = ([one for one in characters if category(one)[0] == kind] for kind in "LN")
    return _ranges(letters), _ranges(numbers), _ranges(one for one in characters if one in SPACES)


@lru_cache(maxsize=2)
def _unknown(composed: bool) -> re.Pattern[str]:
    """Return a pattern that finds a character which has to be left to the library."""
    return re.compile(f"[^{_ranges(_alphabet(composed))}]")


@lru_cache(maxsize=2)
def _alphabet(composed: bool) -> list[str]:
    """Return the known characters: no marks that join a letter, none unassigned, none that a normalizer would change."""
    characters = (chr(code) for first, last in KNOWN for code in range(first, last + 1))
    return [character for character in characters
            if category(character)[0] != "M" and category(character) not in ("Cn", "Cs", "Co") and character not in CASELESS
            and (not composed or normalize("NFC", character) == character)]


def _ranges(characters: Iterable[str]) -> str:
    """Return characters in order of their code as the inside of a character class."""
    codes = [ord(character) for character in characters]
    runs = [[code for _, code in run] for _, run in groupby(enumerate(codes), lambda pair: pair[1] - pair[0])]
    return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)
