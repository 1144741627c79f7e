"""Which text trains and which validates. No text is on both sides, also where documents repeat.

`seeded` draws whole documents if there are enough of them, else spans of text; `tail` takes the end of the text, as
nanoGPT does. Source: karpathy/nanoGPT, data/shakespeare_char/prepare.py (train = data[:int(n * 0.9)]).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from powertrain.data.documents import Document
from powertrain.data.order import SPLIT_STREAM, seeded_order
from powertrain.records import WrongUse

SplitKind = Literal["seeded", "tail"]
Span = tuple[int, int]                       # start and stop, in characters

ENOUGH_DOCUMENTS = 20                        # distinct ones; with fewer, one of them is too large a share of the text
SPANS = 100                                  # so that a share can be met to about 1 %


@dataclass(frozen=True)
class Split:
    """Both sides in the order of the source. A text that was cut gives a document for each contiguous run."""

    train: list[Document]
    validation: list[Document]


def split_documents(documents: Sequence[Document], share: float, kind: SplitKind, seed: int) -> Split:
    """Holds out about `share` (0..1) of the characters. `seed` decides a seeded split; share 0 holds out nothing.

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
    """The first int(n * (1 - share)) of all n characters train; the document at the border is cut."""
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
    spans = {text: [(0, len(text))] if whole else _spans(text, span_chars) for text in copies}
    units = [(text, span) for text in spans for span in spans[text]]
    drawn = {units[number] for number in
             _drawn([(stop - start) * copies[text] for text, (start, stop) in units], share, seed)}
    split = Split([], [])
    for document in documents:
        for is_drawn, (start, stop) in _runs(document.text, spans[document.text], drawn):
            (split.validation if is_drawn else split.train).append(Document(document.text[start:stop], document.origin))
    return split


def _runs(text: str, spans: Sequence[Span], drawn: set[tuple[str, Span]]) -> Iterator[tuple[bool, Span]]:
    """Neighbouring spans of `text` on the same side as one, with whether they were drawn."""
    for is_drawn, group in itertools.groupby(spans, lambda span: (text, span) in drawn):
        run = list(group)
        yield is_drawn, (run[0][0], run[-1][1])


def _drawn(characters: Sequence[int], share: float, seed: int) -> list[int]:
    """The units held out, by their number: in the seed's order, each that brings their sum nearer to the share."""
    missing = share * sum(characters)
    drawn = []
    for unit in seeded_order(seed, SPLIT_STREAM, len(characters)).tolist():
        if characters[unit] < 2 * missing:
            drawn.append(unit)
            missing -= characters[unit]
    return drawn or [characters.index(min(characters))]


def _spans(text: str, span_chars: int) -> list[Span]:
    """`text` in spans of about `span_chars`, each ending with its line if the line ends within another `span_chars`."""
    return list(itertools.pairwise([0, *_cuts(text, span_chars), len(text)]))


def _cuts(text: str, span_chars: int) -> Iterator[int]:
    cut = span_chars
    while cut < len(text):
        newline = text.find("\n", cut - 1, cut + span_chars)
        cut = newline + 1 if newline >= 0 else cut
        if cut < len(text):
            yield cut
        cut += span_chars
