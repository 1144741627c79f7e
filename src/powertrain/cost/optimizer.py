"""What the optimizer of a step keeps, moves and computes: its state, the bytes of clipping and update, and FLOPs.

Which optimizer that is comes as `OptimizerFacts`: bytes by kind of weight. No optimizer is known by name here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from powertrain.cost.weights import has_frozen_base
from powertrain.records import ModelFacts, OptimizerFacts
from powertrain.shapes import FP32

WEIGHT_PASSES = 3                            # fp32 read: weight, gradient; written: weight; its state is read and written
CLIP_PASSES = 3                              # the gradient: read for its norm, read and written to scale it


@dataclass(frozen=True)
class Trained:
    """Trained weights of one shape."""

    shape: tuple[int, ...]
    is_hidden: bool                          # in a block
    count: int                               # such tensors in the model

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def trained_weights(model: ModelFacts) -> Iterator[Trained]:
    """Yield the trained weights by shape: of adapters where the model has some, else of all."""
    for name, shape in model.shapes.items():
        is_adapter, is_hidden = ".adapters." in name, name.startswith("blocks.")
        if is_adapter or not has_frozen_base(model):
            yield Trained(shape, is_hidden, len(model.adapted_layers) if is_adapter else model.layers if is_hidden else 1)


def state_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> int:
    """Return the bytes of the optimizer's state. Where shapes are not known, every weight counts as a hidden matrix's."""
    alike = optimizer.hidden_bytes == optimizer.outside_bytes == optimizer.vector_bytes and not optimizer.line_bytes
    weights = [] if alike else list(trained_weights(model))
    if sum(one.count * math.prod(one.shape) for one in weights) != model.trainable:
        return round(optimizer.hidden_bytes * model.trainable)
    total = 0.0
    for one in weights:
        per_weight = optimizer.vector_bytes if not one.is_matrix else \
            optimizer.hidden_bytes if one.is_hidden else optimizer.outside_bytes
        total += one.count * (per_weight * math.prod(one.shape) + optimizer.line_bytes * sum(one.shape) * one.is_matrix)
    return round(total)


def moved_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> float:
    """Return the bytes that clipping and update read and write in a step."""
    return FP32 * CLIP_PASSES * model.trainable + update_bytes(model, optimizer)


def update_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> float:
    """Return the bytes that the update alone reads and writes, each tensor once."""
    return FP32 * WEIGHT_PASSES * model.trainable + 2 * state_bytes(model, optimizer)


def update_flops(model: ModelFacts, optimizer: OptimizerFacts) -> float:
    """Return the FLOPs of the matrix products in an update: those that make hidden matrices orthogonal.

    A round on a matrix of m x n, m the smaller: two products of 2mmn and one of 2mmm. Source: the Newton-Schulz iteration
    in torch.optim.Muon.
    """
    total = 0.0
    for one in trained_weights(model) if optimizer.orthogonalising_rounds else ():
        if one.is_hidden and one.is_matrix:
            small, large = sorted(one.shape)
            total += one.count * optimizer.orthogonalising_rounds * (4.0 * small * small * large + 2.0 * small**3)
    return total
