"""A group of any number of processes in this one process: torch's fake back end, fake tensors, and a count of collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.cost.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Division
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.records import Batch
from powertrain.training.ranks import GroupRanks
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


@contextmanager
def fake_group(processes: int) -> Iterator[None]:
    """Be the first of `processes` processes, none of which answers or is waited for."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def counted_step(config: ModelConfig, division: Division, passes: int, adapters: AdapterConfig | None = None,
                 frozen: torch.dtype = torch.float32) -> Counting:
    """Make one step's passes, and exchange what is exchanged, in a group of so many processes; return its collectives."""
    if division.tensor > 1:
        with fake_group(division.processes):
            return _counted_tensor_parts(Decoder(config), division, passes)
    shape = (division.processes,) if division.replicas == 1 else (division.replicas, division.shards)
    with fake_group(division.processes):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape):])
        # fake weights cannot be converted to another type; those of a model with adapters are real, and so it must be small
        with nullcontext() if adapters else FakeTensorMode(allow_non_fake_inputs=True):
            return _counted(_model(config, adapters, frozen), division, mesh, passes)


def _model(config: ModelConfig, adapters: AdapterConfig | None, frozen: torch.dtype) -> Decoder:
    model = Decoder(config)
    if adapters is not None:
        model.to(frozen)
        add_adapters(model, adapters)
    return model


def _counted(model: nn.Module, division: Division, mesh: DeviceMesh, passes: int) -> Counting:
    parts = _divided(model, division, mesh) if division.stage else []
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


def _pass(model: nn.Module) -> None:
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.arange(TOKENS), (TOKENS,), TOKENS)
    nn.functional.cross_entropy(model(batch).float(), tokens, reduction="sum").backward()


def _summed(model: nn.Module, division: Division) -> None:
    """Sum loss and gradients as a run's step does, but for the count of gradients, which asks for real numbers."""
    ranks = GroupRanks(0, division.processes)
    ranks.sum([torch.zeros(()), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])


def _divided(model: nn.Module, division: Division, mesh: DeviceMesh) -> list[Any]:
    """Divide the weights by FSDP2: each block is a group, and all other weights are one that stays gathered in a pass."""
    blocks: list[Any] = [fully_shard(block, mesh=mesh, reshard_after_forward=division.stage == 3)
                         for block in model.get_submodule("blocks").children()]
    parts = [fully_shard(model, mesh=mesh, reshard_after_forward=False), *blocks]
    for part in parts:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return parts
