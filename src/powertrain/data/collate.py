"""Examples laid end to end as the flat batch that a model reads. The only file of this room that loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powertrain.data.example import Example
from powertrain.records import IGNORE, Batch, Source

PAD = 0                                      # any token: nothing looks at it, and it trains nothing


def collate(examples: Sequence[Example]) -> Batch:
    """One flat batch of at least one example: T = the sum of their lengths, no padding, each a document of its own."""
    assert examples, "a batch needs an example"
    lengths = tuple(len(example.inputs) for example in examples)
    targets = np.concatenate([example.targets for example in examples])
    sources = [example.source for example in examples if example.source is not None]
    segments = [example.segments for example in examples if example.segments is not None]
    return Batch(
        tokens=_joined([example.inputs for example in examples]),
        targets=torch.from_numpy(targets),
        positions=_joined([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths=lengths,
        trained_tokens=int(np.count_nonzero(targets != IGNORE)),
        source=Source(_joined(sources), tuple(map(len, sources))) if sources else None,
        segments=_joined(segments) if segments else None,
    )


def collate_padded(examples: Sequence[Example]) -> Batch:
    """As `collate`, each document padded to the longest one: what trainers without packing compute.

    For causal models only: tokens behind a document's end are seen by none of its own.
    """
    longest = max(len(example.inputs) for example in examples)
    padded = [Example(_padded(example.inputs, longest, PAD), _padded(example.targets, longest, IGNORE))
              for example in examples]
    batch = collate(padded)
    padding_tokens = sum(longest - len(example.inputs) for example in examples)
    return Batch(batch.tokens, batch.targets, batch.positions, batch.lengths, batch.trained_tokens, padding_tokens)


def collate_filled(examples: Sequence[Example], multiple: int) -> Batch:
    """As `collate`, with a document of padding behind the others where T would not be a multiple of `multiple`.

    For libraries that make their products ready for each size they meet: they then meet few.
    """
    missing = -sum(len(example.inputs) for example in examples) % multiple
    if not missing:
        return collate(examples)
    filler = Example(np.full(missing, PAD, dtype=np.int64), np.full(missing, IGNORE, dtype=np.int64))
    return replace(collate([*examples, filler]), padding_tokens=missing)


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _padded(values: npt.NDArray[np.int64], length: int, filler: int) -> npt.NDArray[np.int64]:
    return np.concatenate([values, np.full(length - len(values), filler, dtype=np.int64)])
