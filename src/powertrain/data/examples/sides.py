"""Which examples validate, and which an epoch trains, how often: arrays of few bytes for each of millions of examples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.data.order import SPLIT_STREAM, draw_share, draw_tokens, seeded_order
from powertrain.records import WrongUse

AT_ONCE = 1 << 20            # examples of which numbers are in memory


def held_out(prompts: npt.NDArray[np.uint64], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return (N,) whether each example validates: whole prompts in the seed's order, as near to `share` of the examples
    as they allow, and at least one. Raises WrongUse if all are of one prompt.
    """
    if share == 0:
        return np.zeros(len(prompts), dtype=np.bool_)
    ordered = np.sort(prompts)
    begins = places_of(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    if len(begins) < 2:
        raise WrongUse(f"data.validation_share={share:g} cannot hold anything out of {len(prompts)} examples that all have "
                       "the same prompt, or are pieces of one text; give more data, name other data with "
                       "data.validation_source, or set data.validation_share=0")
    counts = np.diff(begins, append=begins.dtype.type(len(ordered)))
    drawn = draw_share(counts, share, seed, most=len(begins) - 1)
    return is_among(prompts, np.sort(ordered[begins[drawn]]))


def is_among(prompts: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return (N,) whether each of `prompts` is one of `known`, which are in order."""
    found = np.zeros(len(prompts), dtype=np.bool_)
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first:first + AT_ONCE]
        found[first:first + AT_ONCE] = known[np.minimum(np.searchsorted(known, some), len(known) - 1)] == some
    return found


def places_of(wanted: npt.NDArray[np.bool_], first: int = 0) -> npt.NDArray[Any]:
    """Return where `wanted` is true, counted from `first`: in 4 bytes each where the numbers fit."""
    dtype = np.dtype(np.int32 if first + len(wanted) < 2**31 else np.int64)
    parts = [(np.flatnonzero(wanted[begin:begin + AT_ONCE]) + first + begin).astype(dtype)
             for begin in range(0, len(wanted), AT_ONCE)]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def joined(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return columns one after the other; a single one stays where it is."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def weighted(sources: Sequence[npt.NDArray[Any]], weights: Sequence[float] | None, seed: int) -> npt.NDArray[Any]:
    """Return the examples of an epoch: those of each source as often as its weight says, a fraction by a seeded draw."""
    if weights is None:
        return joined(sources)
    parts = []
    for number, (examples, weight) in enumerate(zip(sources, weights, strict=True)):
        whole, rest = divmod(weight, 1.0)
        parts += [examples] * int(whole)
        extra = round(rest * len(examples))
        if extra:
            drawn = seeded_order(seed, SPLIT_STREAM - 1 - number, len(examples))[:extra]
            parts.append(examples[np.sort(drawn)])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def shared(shares: Sequence[float], sources: Sequence[npt.NDArray[Any]], lengths: npt.NDArray[np.int64],
           seed: int) -> npt.NDArray[Any]:
    """Return the examples of an epoch whose tokens are divided among the sources by `shares`; `lengths` are of all examples.

    An epoch has the first source's examples once. The others give their shares beside it: some of their examples, drawn by the
    seed, or all of them several times.
    """
    first = int(lengths[sources[0]].sum())
    parts = [sources[0]]
    for number, (share, examples) in enumerate(zip(shares[1:], sources[1:], strict=True), 1):
        times = draw_tokens(lengths[examples], first * share / shares[0], seed, number)
        parts += [examples[times > again] for again in range(int(times.max(initial=0)))]
    return np.concatenate(parts)
