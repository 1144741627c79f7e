"""A group of any number of processes in this one process: torch's fake back end, fake tensors, and a count of collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.cost.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Division
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.records import Batch
from powertrain.training.ranks import GroupRanks, Number, T
from powertrain.training.setup import Setup
from powertrain.training.sharded import ShardedRanks, Sharding, parts_of
from powertrain.training.tensor_parallel import TensorParallel

# by operator: the kind of the collective, and which argument is the whole tensor
KINDS = {"c10d::allreduce_": (ALL_REDUCE, 0), "c10d::_allgather_base_": (ALL_GATHER, 0),
         "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 1)}
TOKENS = 24


@dataclass
class Counting(TorchDispatchMode):
    """Counts the collectives of floating numbers inside, and their bytes. Whole numbers are counts and flags."""

    counts: Counter[str] = field(default_factory=Counter)
    total_bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and name != "c10d::monitored_barrier_":
            kind, place = KINDS[name]
            tensors = args[place] if isinstance(args[place], list | tuple) else [args[place]]
            if tensors[0].is_floating_point() or tensors[0].dtype == torch.uint8:    # FSDP gathers types together as bytes
                self.counts[kind] += 1
                self.total_bytes[kind] += sum(math.prod(one.shape) * one.element_size() for one in tensors)
        return func(*args, **(kwargs or {}))


class Copying(TorchDispatchMode):
    """Allocates what gloo does in an exchange: a copy of the whole tensor. tests/training/test_sharded.py has gloo itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, place = KINDS.get(func._schema.name, ("", 0))
        if kind in (ALL_GATHER, REDUCE_SCATTER):
            torch.empty_like(args[place])
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_group(processes: int) -> Iterator[None]:
    """Be the first of `processes` processes, none of which answers or is waited for."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


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
    ranks = FakeRanks(0, division.processes)
    if not division.stage:
        return setup.shared_by(ranks)
    sharding = Sharding(division.stage, division.replicas)
    sharding.divide(setup.model)
    return replace(setup, ranks=FakeShardedRanks(0, division.processes, model=setup.model, division=sharding))


def counted_step(config: ModelConfig, division: Division, passes: int, adapters: AdapterConfig | None = None,
                 frozen: torch.dtype = torch.float32) -> Counting:
    """Make one step's passes, and exchange what is exchanged, in a group of so many processes; return its collectives."""
    if division.tensor > 1:
        with fake_group(division.processes):
            return _counted_tensor_parts(Decoder(config), division, passes)
    with fake_group(division.processes):
        sharding = Sharding(division.stage, division.replicas)
        mesh = sharding.mesh("cpu")
        # fake weights cannot be converted to another type; those of a model with adapters are real, and so it must be small
        with nullcontext() if adapters else FakeTensorMode(allow_non_fake_inputs=True):
            model = _model(config, adapters, frozen)
            if division.stage:
                sharding.divide(model, mesh)
            return _counted(model, division, passes)


def _model(config: ModelConfig, adapters: AdapterConfig | None, frozen: torch.dtype) -> Decoder:
    model = Decoder(config)
    if adapters is not None:
        model.to(frozen)
        add_adapters(model, adapters)
    return model


def _counted(model: Decoder, division: Division, passes: int) -> Counting:
    parts = parts_of(model)
    for _ in range(2):                       # FSDP's first step is another: the order of its groups is not known yet
        with Counting() as found:
            for number in range(passes):
                last = number == passes - 1
                for part in parts:
                    part.set_requires_gradient_sync(division.stage > 1 or last)
                    part.set_reshard_after_backward(division.stage == 3 or last)
                _pass(model)
            if not parts:
                _summed(model, division)
        for parameter in model.parameters():
            parameter.grad = None
        for part in parts:
            part.reshard()
    return found


def _counted_tensor_parts(model: Decoder, division: Division, passes: int) -> Counting:
    """Divide the blocks by our own means, with real weights: a cut of weights is not what is counted."""
    parts = TensorParallel(division.tensor)
    parts.divide(model)
    ranks = parts.ranks(model, GroupRanks(0, division.processes))
    with Counting() as found:
        for _ in range(passes):
            _pass(model)
        ranks.sum([torch.zeros(()), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    return found


def _pass(model: Decoder) -> None:
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.arange(TOKENS), (TOKENS,), TOKENS)
    nn.functional.cross_entropy(model.logits(model.hidden(batch)).float(), tokens, reduction="sum").backward()


def _summed(model: nn.Module, division: Division) -> None:
    """Sum loss and gradients as a run's step does, but for the count of gradients, which asks for real numbers."""
    ranks = GroupRanks(0, division.processes)
    ranks.sum([torch.zeros(()), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
