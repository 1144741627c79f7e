"""One example as the model sees it, in words: special tokens visible, each piece trained or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from powertrain.data.example import Example
from powertrain.data.tokenizers import Tokenizer
from powertrain.records import IGNORE
from powertrain.records.examples import Piece


def pieces_of(example: Example, kind: str, tokenizer: Tokenizer) -> list[Piece]:
    """The example's tokens in order, those that follow each other and are alike as one piece.

    The last target of a causal example, which is not an input of it, comes last.
    """
    if kind == "span":
        first, last = (int(place) for place in example.targets)
        numbers = np.arange(len(example.inputs))
        return _pieces("model", example.inputs, (numbers >= first) & (numbers <= last), tokenizer)
    trained = example.targets != IGNORE
    if kind == "pair":
        assert example.source is not None
        source = _pieces("encoder", example.source, np.zeros(len(example.source), np.bool_), tokenizer)
        return source + _pieces("decoder", example.targets, trained, tokenizer)
    ids = np.append(example.inputs, example.targets[-1])
    return _pieces("model", ids, np.append(False, trained), tokenizer)


def _pieces(reader: str, ids: npt.NDArray[np.int64], trained: npt.NDArray[np.bool_], tokenizer: Tokenizer) -> list[Piece]:
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    texts = _texts(ids, borders, tokenizer)
    return [Piece(reader, text, bool(trained[border])) for text, border in zip(texts, borders, strict=False)]


def _texts(ids: npt.NDArray[np.int64], borders: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text between each two borders: what the decoded whole gains there, since some tokenizers drop the first space
    of whatever is decoded."""
    texts: list[str] = []
    before = ""
    for start, stop in pairwise(borders):
        so_far = tokenizer.decode(ids[:stop])
        texts.append(so_far[len(before):] if so_far.startswith(before) else tokenizer.decode(ids[start:stop]))
        before = so_far
    return texts
