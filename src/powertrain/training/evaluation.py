"""The loss on held-out text: same precision and kernels as training, no dropout, the same tokens every time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from powertrain.data.example import Example
from powertrain.models.model import evaluating
from powertrain.records.events import Evaluated
from powertrain.training.memory import passes
from powertrain.training.setup import Setup


def evaluate(setup: Setup, examples: Sequence[Example], *, tokens_per_byte: float | None) -> Evaluated:
    """Return the mean loss over `examples`, which must not be empty, as an event without its step.

    `tokens_per_byte` of the text turns nats per token into bits per byte; None where it is not known.
    """
    started = time.perf_counter()
    losses: list[torch.Tensor] = []          # on the device, so that nothing waits for it batch by batch
    units = 0
    with evaluating(setup.model), torch.no_grad(), passes(setup.ranks):
        for first in range(0, len(examples), setup.train_batch_size):
            last = min(first + setup.train_batch_size, len(examples))
            for passed in setup.passes([examples[i] for i in range(first, last)]):
                batch = passed.to(setup.device)
                losses.append(setup.held_out_loss(batch))
                units += setup.objective.units(batch)
    (total,) = setup.ranks.total(float(torch.stack(losses).cpu().double().sum()) if losses else 0.0)
    (units,) = setup.ranks.total(units)
    loss = total / units
    bits_per_byte = None if tokens_per_byte is None else loss * tokens_per_byte / math.log(2)
    return Evaluated(loss=loss, tokens=units, bits_per_byte=bits_per_byte, seconds=time.perf_counter() - started)


def spread(examples: Sequence[Example], most: int | None) -> Sequence[Example]:
    """Return at most `most` of the examples, evenly spaced over the whole text, the same ones every time."""
    if most is None or len(examples) <= most:
        return examples
    return [examples[i * len(examples) // most] for i in range(most)]
