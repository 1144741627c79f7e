"""Examples laid end to end as the flat batch that a model reads. The only file of this room that loads torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from powertrain.data.blocks import Example
from powertrain.records import IGNORE, Batch


def collate(examples: Sequence[Example]) -> Batch:
    """One flat batch of at least one example: T = the sum of their lengths, no padding, each a document of its own."""
    assert examples, "a batch needs an example"
    lengths = tuple(len(example.inputs) for example in examples)
    targets = np.concatenate([example.targets for example in examples])
    return Batch(
        tokens=torch.from_numpy(np.concatenate([example.inputs for example in examples])),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        lengths=lengths,
        trained_tokens=int(np.count_nonzero(targets != IGNORE)),
    )
