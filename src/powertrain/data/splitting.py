"""Which characters of a text train and which validate: no text does both, also where documents repeat.

A `seeded` split draws whole documents if there are enough of them, else spans of text; a `tail` split takes the end of the
text, as nanoGPT does. Source: karpathy/nanoGPT, data/shakespeare_char/prepare.py (train = data[:int(n * 0.9)]).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from powertrain.data.documents import Document, Measured
from powertrain.data.order import draw_share
from powertrain.records import WrongUse

SplitKind = Literal["seeded", "tail"]
Run = tuple[bool, int, int]                  # whether it validates, where it begins and ends, in characters
Piece = tuple[bool, str, bool]               # whether it validates, the text, and whether a run ends with it
Numbers = npt.NDArray[np.integer[Any]]

ENOUGH_DOCUMENTS = 20                        # distinct ones; with fewer, one of them is too large a share of the text
SPANS = 100                                  # so that a share can be met to about 1 %


@dataclass(frozen=True, eq=False)
class Split:
    """The runs of each document. Documents with the same number in `texts` are split alike."""

    characters: Numbers                      # (documents,)
    texts: Numbers                           # (documents,)
    validates: npt.NDArray[np.bool_]         # (texts,)
    cut: Mapping[int, Sequence[Run]] = field(default_factory=dict)       # text -> its runs, where it has several

    def runs(self, number: int) -> Sequence[Run]:
        """Return the runs of document `number`, in order: neighbours are on different sides."""
        text = int(self.texts[number])
        return self.cut.get(text) or [(bool(self.validates[text]), 0, int(self.characters[number]))]


def split_documents(documents: Iterable[Document], measured: Measured, share: float, kind: SplitKind, seed: int) -> Split:
    """Hold out about `share` (0..1) of the characters. `seed` decides a seeded split; share 0 holds out nothing.

    Raises WrongUse if the text is too short to be split so.
    """
    if not 0 <= share < 1:
        raise WrongUse(f"data.validation_share={share:g} is not a share; use 0 or more, and less than 1")
    characters = np.frombuffer(measured.characters, np.int64)
    if share == 0:
        return Split(characters, np.zeros(len(characters), np.int8), np.zeros(1, np.bool_))
    total = int(characters.sum())
    split, held_out = _tail(characters, total, share) if kind == "tail" else \
        _seeded(documents, measured, characters, share, seed)
    if not 0 < held_out < total:
        empty = "training" if held_out else "validation"
        raise WrongUse(f"data.validation_share={share:g} of {total} characters leaves no {empty} text; "
                       "give more text, or set data.validation_share=0")
    return split


def _tail(characters: Numbers, total: int, share: float) -> tuple[Split, int]:
    """Train on the first int(n * (1 - share)) of all n characters; the document at the border is cut."""
    left = int(total * (1 - share))
    ends = np.cumsum(characters)
    border = int(np.searchsorted(ends, left))
    within = left - int(ends[border] - characters[border])
    cut = {border: [(False, 0, within), (True, within, int(characters[border]))]} if within < characters[border] else {}
    return Split(characters, np.arange(len(characters)), np.arange(len(characters)) > border, cut), total - left


def _seeded(documents: Iterable[Document], measured: Measured, characters: Numbers, share: float,
            seed: int) -> tuple[Split, int]:
    texts, firsts = _distinct(np.frombuffer(measured.hashes, np.uint64))
    copies = np.bincount(texts)
    if len(firsts) >= ENOUGH_DOCUMENTS:
        counts = characters[firsts] * copies
        drawn = draw_share(counts, share, seed)
        validates = np.zeros(len(firsts), np.bool_)
        validates[drawn] = True
        return Split(characters, texts, validates), int(counts[drawn].sum())
    span_chars = max(1, int(characters[firsts].sum()) // SPANS)
    wanted, spans = set(firsts.tolist()), []
    for number, document in enumerate(documents):
        if number in wanted:
            end = int(characters[number])
            cuts = [cut for cut in line_cuts(document.pieces(), span_chars) if cut < end]
            spans += [(int(texts[number]), *span) for span in itertools.pairwise([0, *cuts, end])]
    if not spans:
        raise changed("the text")
    weights = [(stop - start) * int(copies[text]) for text, start, stop in spans]
    held = set(draw_share(weights, share, seed))
    runs: dict[int, list[Run]] = {}
    for number, (text, start, stop) in enumerate(spans):
        of_text = runs.setdefault(text, [])
        if of_text and of_text[-1][0] == (number in held):
            start = of_text.pop()[1]
        of_text.append((number in held, start, stop))
    return Split(characters, texts, np.zeros(len(firsts), np.bool_), runs), sum(weights[number] for number in held)


def _distinct(hashes: npt.NDArray[np.uint64]) -> tuple[Numbers, Numbers]:
    """Return the number (documents,) of each one's text, in the order in which texts first appear, and where that is."""
    _, firsts, found = np.unique(hashes, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks[found], firsts[order]


def line_cuts(pieces: Iterable[str], span_chars: int) -> Iterator[int]:
    """Yield a cut after about `span_chars`, behind the line's end if the line ends within another `span_chars`."""
    cut, begin = span_chars, 0
    for piece in pieces:
        end = begin + len(piece)
        while cut <= end:
            newline = piece.find("\n", max(cut - 1 - begin, 0), cut + span_chars - begin)
            if newline < 0 and cut + span_chars > end:
                break                        # the line may end in the next piece
            cut = begin + newline + 1 if newline >= 0 else cut
            yield cut
            cut += span_chars
        begin = end
    yield cut


def runs_of(documents: Iterable[Document], split: Split) -> Iterator[Piece]:
    """Yield all text in pieces, as the documents give them. Raises WrongUse if a document has changed since it was measured."""
    number = -1
    for number, document in enumerate(documents):
        if number == len(split.characters):
            raise changed(document.origin)
        runs, position, stop = iter(split.runs(number)), 0, 0
        for piece in document.pieces():
            start = 0
            while start < len(piece):
                if position == stop:
                    validates, _, stop = next(runs, (False, 0, 0))
                text = piece[start:start + stop - position]
                if not text:
                    raise changed(document.origin)
                start, position = start + len(text), position + len(text)
                yield validates, text, position == stop
        if position != split.characters[number]:
            raise changed(document.origin)
    if number + 1 < len(split.characters):
        raise changed("the text")


def changed(what: str) -> WrongUse:
    return WrongUse(f"{what} changed while it was read; start again when nothing writes to it")


def whole_pieces(runs: Iterable[Piece], cut: Callable[[str], Sequence[str]]) -> Iterator[Piece]:
    """Yield the same text in pieces that are encoded as they would be within their run.

    `cut` cuts a text so; the run may go on behind its last piece.
    """
    rest = ""
    for validates, text, is_last in runs:
        pieces = [piece for piece in cut(rest + text) if piece or not is_last]
        rest = "" if is_last else pieces.pop()
        yield from ((validates, piece, is_last and number == len(pieces)) for number, piece in enumerate(pieces, 1))
