"""Examples laid end to end as the flat batch that a model reads. Only functions of this file load torch in this room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from powertrain.data.example import Example
from powertrain.records import IGNORE, Batch, Source

if TYPE_CHECKING:
    from torch import Tensor

PAD = 0                                      # any token: nothing looks at it, and it trains nothing


def collate(examples: Sequence[Example]) -> Batch:
    """One flat batch of at least one example: T = the sum of their lengths, no padding, each a document of its own."""
    import torch

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
    """As `collate`, with documents of padding behind the others where T would not be a multiple of `multiple`.

    For libraries that make their products ready for each size they meet: they then meet few. No document of padding is
    longer than the longest real one, so that padding has no position that no token has, and costs no more attention.
    """
    missing = -sum(len(example.inputs) for example in examples) % multiple
    if not missing:
        return collate(examples)
    longest = max(len(example.inputs) for example in examples)
    whole, rest = divmod(missing, longest)
    fillers = [Example(np.full(length, PAD, dtype=np.int64), np.full(length, IGNORE, dtype=np.int64))
               for length in (longest,) * whole + ((rest,) if rest else ())]
    return replace(collate([*examples, *fillers]), padding_tokens=missing)


def real_documents(batch: Batch) -> int:
    """How many of a filled batch's documents are not padding."""
    left, count = batch.padding_tokens, len(batch.lengths)
    while left > 0:
        count -= 1
        left -= batch.lengths[count]
    return count


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    import torch

    return torch.from_numpy(np.concatenate(parts))


def _padded(values: npt.NDArray[np.int64], length: int, filler: int) -> npt.NDArray[np.int64]:
    return np.concatenate([values, np.full(length - len(values), filler, dtype=np.int64)])
