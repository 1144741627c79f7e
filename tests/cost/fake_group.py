"""A group of any number of processes in this one process, as run/rehearsal.py makes it, for whole steps and divided blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.cost.collectives import ALL_GATHER, REDUCE_SCATTER, Division
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.run.rehearsal import KINDS, Counting, fake_group, one_pass, sum_gradients
from powertrain.training.ranks import GroupRanks, Number, T
from powertrain.training.setup import Setup
from powertrain.training.sharded import ShardedRanks, Sharding
from powertrain.training.tensor_parallel import TensorParallel


class Copying(TorchDispatchMode):
    """Allocates what gloo does in an exchange: a copy of the whole tensor. tests/training/test_sharded.py has gloo itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, place = KINDS.get(func._schema.name, ("", 0))
        if kind in (ALL_GATHER, REDUCE_SCATTER):
            torch.empty_like(args[place])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class FakeRanks(GroupRanks):
    """A process that computes every pass of its step, and sums the gradients with others that do not answer."""

    def share(self, parts: Sequence[T], costs: Sequence[int]) -> list[T]:
        return list(parts)

    def each(self, value: T) -> list[T]:
        return [value]

    def total(self, *numbers: Number) -> tuple[Number, ...]:
        return numbers


@dataclass(frozen=True)
class FakeShardedRanks(ShardedRanks, FakeRanks):
    """Such a process, which divides the weights with the others."""


def shared(setup: Setup, division: Division) -> Setup:
    """Return the setup of such a process, after its weights are divided."""
    if not division.stage:
        return setup.shared_by(FakeRanks(0, division.processes))
    sharding = Sharding(division.stage, division.replicas)
    sharding.divide(setup.model)
    ranks = FakeShardedRanks(0, division.processes, model=setup.model, division=sharding)
    return replace(setup, sharding=sharding, ranks=ranks)


def counted_tensor_parts(config: ModelConfig, division: Division, passes: int) -> Counting:
    """Divide the blocks by our own means, with real weights: a cut of weights is not what is counted."""
    with fake_group(division.processes):
        model, parts = Decoder(config), TensorParallel(division.tensor)
        parts.divide(model)
        ranks = parts.ranks(model, GroupRanks(0, division.processes))
        with Counting() as found:
            for _ in range(passes):
                one_pass(model)
            sum_gradients(model, ranks)
    return found
