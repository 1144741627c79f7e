"""How much of a padded batch is padding, and how much fills a packed pass up, estimated from the examples' lengths."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from powertrain.shapes import QUANTILES

DRAWS = 256                                  # points at which the distribution of lengths is integrated


def length_at(quantiles: Mapping[str, int], share: float) -> float:
    """Tokens that a `share` of the documents do not exceed, on straight lines between the known quantiles."""
    known = sorted((QUANTILES[name], tokens) for name, tokens in quantiles.items() if name in QUANTILES)
    if not known:
        raise ValueError("no quantile of the lengths is known")
    for (low, short), (high, long) in itertools.pairwise(known):
        if share <= high:
            return short + (long - short) * max(0.0, share - low) / (high - low)
    return float(known[-1][1])


def mean_length(quantiles: Mapping[str, int]) -> float:
    """The mean of the lengths on those straight lines."""
    return sum(length_at(quantiles, (draw + 0.5) / DRAWS) for draw in range(DRAWS)) / DRAWS


def longest_of(quantiles: Mapping[str, int], documents: int) -> float:
    """The expected length of the longest of `documents` that are drawn at random."""
    # the largest of n uniform draws is u with probability n u^(n-1) du: its n-th power is uniform
    return sum(length_at(quantiles, ((draw + 0.5) / DRAWS) ** (1 / documents)) for draw in range(DRAWS)) / DRAWS


def padding_share(quantiles: Mapping[str, int], documents: int, *, grouped_from: int | None = None) -> float:
    """The share of slots that padding takes (0..1) where each pass has `documents`, all as long as its longest.

    With `grouped_from`, a step of so many documents is sorted by length before it is cut into passes: the k-th shortest
    of n is then about as long as the quantile k / (n + 1).
    """
    if grouped_from is None:
        slots = longest_of(quantiles, documents)
        return max(0.0, 1 - mean_length(quantiles) / slots) if slots else 0.0
    ends = [min(first + documents, grouped_from) for first in range(0, grouped_from, documents)]
    starts = [0, *ends[:-1]]
    slots = sum((end - start) * length_at(quantiles, end / (grouped_from + 1))
                for start, end in zip(starts, ends, strict=True))
    real = sum(length_at(quantiles, (k + 1) / (grouped_from + 1)) for k in range(grouped_from))
    return max(0.0, 1 - real / slots) if slots else 0.0


def fill_share(tokens: int, pass_tokens: int, multiple: int) -> float:
    """The share of slots (0..1) that fills passes up to a `multiple`, where a step's `tokens` are dealt to packed passes.

    What is missing to the next multiple is as likely to be any number from 0 to `multiple` - 1.
    """
    passes = -(-tokens // pass_tokens)
    filled = passes * (multiple - 1) / 2
    return filled / (tokens + filled)
