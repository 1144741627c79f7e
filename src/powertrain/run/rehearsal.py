"""The exchanges of one step, counted while torch makes them in a group of any number of processes that are not there.

torch's fake back end answers for the others, and fake tensors have shapes and no memory, so a model of any size is divided and
run here as on the machine that it is planned for. What is counted is held against the formulas of cost/collectives.py.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain import planner
from powertrain.cost.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Division, collectives_of
from powertrain.cost.estimate import division_of
from powertrain.facts.measure import TORCH_DTYPES
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.records import Batch, ModelFacts
from powertrain.run.prepare import Prepared
from powertrain.training.ranks import GroupRanks
from powertrain.training.sharded import Sharding, parts_of

# by operator: the kind of the collective, and which argument is the whole tensor
KINDS = {"c10d::allreduce_": (ALL_REDUCE, 0), "c10d::_allgather_base_": (ALL_GATHER, 0),
         "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 1)}
TOKENS = 24                  # of a pass: what is exchanged does not depend on them
MOST_PASSES = 2              # of a step: one whose gradients are kept, and the last
ALIKE = 0.03                 # share of the bytes by which formula and count may differ


@dataclass(frozen=True)
class Shape:
    """What a model is made of, as far as its exchanges depend on it."""

    config: ModelConfig
    adapters: AdapterConfig | None = None
    frozen: torch.dtype = torch.float32      # of the weights below adapters


@dataclass
class Counting(TorchDispatchMode):
    """Counts the collectives of floating numbers inside, and their bytes. Whole numbers are counts and flags."""

    counts: Counter[str] = field(default_factory=Counter)
    total_bytes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

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


def rehearse(prepared: Prepared) -> tuple[list[str], str | None]:
    """Return where the exchanges that a plan counts differ from torch's, and why they cannot be counted here, or None.

    It takes seconds where a model has billions of weights.
    """
    facts, material = prepared.facts, prepared.material
    workload = planner.workload_of(facts, prepared.plan)
    if material.config is None:
        return [], f"{facts.model.provider} computes the model"
    if workload.stages > 1 or workload.tensor_degree > 1:
        return [], "processes hold parts of the blocks, which are cut from real weights"
    frozen = getattr(torch, TORCH_DTYPES.get(facts.model.frozen_dtype, "float32"))
    passes = workload.shared_by(facts.hardware.processes).micro_batches
    shape = Shape(material.config, material.adapters, frozen)
    return differences(facts.model, shape, division_of(workload, facts.hardware), passes), None


def differences(model: ModelFacts, shape: Shape, division: Division, passes: int) -> list[str]:
    """Return in which kinds of exchanges the formulas differ from what torch does; none where they say the same."""
    passes = min(passes, MOST_PASSES)
    found = counted_step(shape, division, passes)
    expected = {one.kind: one for one in collectives_of(model, division, passes)}
    return [f"{kind}: {expected[kind].count if kind in expected else 0:,} by the formula, {found.counts[kind]:,} counted"
            for kind in sorted({*expected, *found.counts})
            if kind not in expected or expected[kind].count != found.counts[kind]
            or abs(expected[kind].total_bytes - found.total_bytes[kind]) > ALIKE * found.total_bytes[kind]]


def counted_step(shape: Shape, division: Division, passes: int) -> Counting:
    """Make one step's passes, and exchange what is exchanged, in a group of so many processes; return its collectives."""
    with fake_group(division.processes):
        sharding = Sharding(division.stage, division.replicas)
        mesh = sharding.mesh("cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = _model(shape)
            if division.stage:
                sharding.divide(model, mesh)
            return _counted(model, division, passes)


def one_pass(model: Decoder) -> None:
    """Run forward and backward over a short document."""
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.arange(TOKENS), (TOKENS,), TOKENS)
    nn.functional.cross_entropy(model.logits(model.hidden(batch)).float(), tokens, reduction="sum").backward()  # type: ignore[no-untyped-call]


def sum_gradients(model: nn.Module, ranks: GroupRanks) -> None:
    """Sum loss and gradients as a run's step does, but for the count of gradients, which asks for real numbers."""
    ranks.sum([torch.zeros(()), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])


def _model(shape: Shape) -> Decoder:
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.frozen)    # fake weights cannot be converted
    try:
        model = Decoder(shape.config)
    finally:
        torch.set_default_dtype(before)
    if shape.adapters is not None:
        add_adapters(model, shape.adapters)
    return model


def _counted(model: Decoder, division: Division, passes: int) -> Counting:
    parts = parts_of(model)
    for _ in range(2):                       # FSDP's first step is another: the order of its groups is not known yet
        found = Counting()
        with found:
            for number in range(passes):
                last = number == passes - 1
                for part in parts:
                    part.set_requires_gradient_sync(division.stage > 1 or last)
                    part.set_reshard_after_backward(division.stage == 3 or last)
                one_pass(model)
            if not parts:
                sum_gradients(model, GroupRanks(0, division.processes))
        for parameter in model.parameters():
            parameter.grad = None
        for part in parts:
            part.reshard()
    return found
