"""Which examples train and which validate, and how often an epoch sees each: numbers over the stored examples, no copies.

Held out is by prompt: what was asked is on one side only, however often it is answered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from powertrain.data.order import SPLIT_STREAM, seeded_order
from powertrain.records import WrongUse

Digests = npt.NDArray[np.uint64]


def held_out(prompts: Digests, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """(N,) whether each example validates: whole prompts in the seed's order, as near to `share` of the examples as they
    allow, and at least one. Raises WrongUse if all are of one prompt.
    """
    chosen = np.zeros(len(prompts), dtype=np.bool_)
    if share == 0:
        return chosen
    distinct, group, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        raise WrongUse(f"data.validation_share={share:g} cannot hold anything out of {len(prompts)} examples that all have "
                       "the same prompt, or are pieces of one text; give more data, name other data with "
                       "data.validation_source, or set data.validation_share=0")
    missing = share * len(prompts)
    drawn: list[int] = []
    sizes = counts.tolist()
    for prompt in seeded_order(seed, SPLIT_STREAM, len(distinct)).tolist():
        if sizes[prompt] < 2 * missing and len(drawn) < len(distinct) - 1:
            drawn.append(prompt)
            missing -= sizes[prompt]
        if missing < 0.5:
            break
    is_drawn = np.zeros(len(distinct), dtype=np.bool_)
    is_drawn[drawn or [int(np.argmin(counts))]] = True
    chosen[:] = is_drawn[group]
    return chosen


def weighted(sources: Sequence[npt.NDArray[np.int64]], weights: Sequence[float] | None, seed: int) -> npt.NDArray[np.int64]:
    """The examples of an epoch, from those of each source: as often as its weight says, a fraction by a seeded draw."""
    parts = []
    for number, (examples, weight) in enumerate(zip(sources, weights or [1.0] * len(sources), strict=True)):
        whole, rest = divmod(weight, 1.0)
        parts += [examples] * int(whole)
        extra = round(rest * len(examples))
        if extra:
            drawn = seeded_order(seed, SPLIT_STREAM - 1 - number, len(examples))[:extra]
            parts.append(examples[np.sort(drawn)])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
