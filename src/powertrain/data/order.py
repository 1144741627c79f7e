"""Which examples a step reads: a pure function of seed and step, so a run resumes without any state of a sampler.

Built on raw Philox output, whose stream numpy keeps across versions; the order that Generator.permutation() gives is
not promised. Source: numpy's NEP 19 (stream compatibility).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

SPLIT_STREAM = 2**64 - 1                     # the stream that draws the validation set: no epoch reaches this number


def seeded_order(seed: int, stream: int, count: int) -> npt.NDArray[np.int64]:
    """A permutation of `count` numbers, the same on every machine: (count,) int64."""
    key = np.array([seed, stream], dtype=np.uint64)
    # stable: two equal draws are possible, if unlikely, and must not depend on the sort's whim
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable").astype(np.int64, copy=False)


@lru_cache(maxsize=2)  # a step may span two epochs, and the next step asks for the same ones
def epoch_order(seed: int, epoch: int, examples: int) -> npt.NDArray[np.int64]:
    """The order of `examples` in the 0-based `epoch`: (examples,) int64, read-only because it is shared."""
    order = seeded_order(seed, epoch, examples)
    order.setflags(write=False)
    return order


def cursor(step: int, train_batch_size: int, examples: int) -> tuple[int, int]:
    """Epoch and position in it (both 0-based) of the first example of the 0-based optimizer step `step`."""
    return divmod(step * train_batch_size, examples)


def step_examples(seed: int, step: int, train_batch_size: int, examples: int) -> npt.NDArray[np.int64]:
    """Indices of the examples of the 0-based optimizer step `step`: (train_batch_size,) int64.

    The epochs run end to end: a step may finish one and begin the next, and no example is left out or seen twice.
    """
    epoch, position = cursor(step, train_batch_size, examples)
    parts = []
    missing = train_batch_size
    while missing > 0:
        part = epoch_order(seed, epoch, examples)[position:position + missing]
        parts.append(part)
        missing -= len(part)
        epoch, position = epoch + 1, 0
    return np.concatenate(parts)
