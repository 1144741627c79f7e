"""The matrices of each block divided among neighbouring processes, which compute every pass together (tensor parallelism).

Of the matrices that read the residual (q, k and v; gate and up) a process keeps whole heads, and the same rows of gate and up.
Of those that write to it (attention_out, mlp_out) a process keeps the columns that belong to these. So a block needs two sums
over the processes forward and two backward. All other weights, embeddings and head too, are whole in each process, and equal:
each process makes the same update of them.

Neighbours form a group of `degree` processes. Where there are more processes, each group computes a share of a step's passes,
and gradients are summed over the processes that hold the same parts.
Source: Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM), section 3.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.frozen import compute_dtype
from powertrain.training.ranks import GroupRanks, Number, Ranks
from powertrain.training.sharded import Cut, exchanging

T = TypeVar("T")
PART = "part"                                # the attribute of a weight; see Part
PARTS, REPLICAS = "parts", "replicas"        # the processes that hold the parts of one model; those that hold the same parts


@dataclass(frozen=True)
class Part:
    """What this process of a group holds of a weight. It is the weight's attribute PART, which sharded.py reads."""

    shape: tuple[int, ...]                   # of the whole weight
    cuts: tuple[Cut, ...]                    # of each process of the group
    group: ProcessGroup

    @property
    def cut(self) -> Cut:
        return self.cuts[dist.get_rank(self.group)]

    def join(self, part: Tensor) -> Tensor:
        """Return a tensor of the weight's shape, whole; each process of the group gives its part."""
        parts = [torch.empty_like(part) for _ in self.cuts]
        with exchanging():
            dist.all_gather(parts, part.contiguous(), group=self.group)
        whole = part.new_empty(self.shape)
        for cut, of_process in zip(self.cuts, parts, strict=True):
            for view, piece in zip(_pieces(whole, cut), torch.split(of_process, cut.lengths, cut.dimension), strict=True):
                view.copy_(piece)
        return whole

    def sum(self, number: Tensor) -> Tensor:
        """Return the sum of a number over the processes of the group."""
        return _summed(number, self.group)


@dataclass
class TensorParallel:
    """How the matrices of a model are divided among the processes of torch.distributed's default group."""

    degree: int                              # processes that hold the parts of one model
    mesh: DeviceMesh | None = None           # once the model is divided
    alone: tuple[float, float] | None = None # figures of a step before that, for the technique's confirm()

    def divide(self, model: Decoder) -> None:
        """Leave this process its part of the blocks' matrices. The degree must divide heads, kv heads and MLP width."""
        from torch.distributed.device_mesh import init_device_mesh

        shape = (dist.get_world_size() // self.degree, self.degree)
        self.mesh = init_device_mesh(next(model.parameters()).device.type, shape, mesh_dim_names=(REPLICAS, PARTS))
        group = self.mesh.get_group(PARTS)
        for block in model.blocks:
            assert isinstance(block, Block)
            for name, cuts in cuts_of(model.config, self.degree).items():
                kind = ReadingLinear if cuts[0].dimension == 0 else WritingLinear
                setattr(block, name, kind.of(block.get_submodule(name), cuts, group))
            block.heads, block.kv_heads = block.heads // self.degree, block.kv_heads // self.degree
            for norm in (block.q_norm, block.k_norm):
                if norm is not None:         # a process has the gradient of its own heads alone
                    norm.weight.register_hook(partial(_summed, group=group))  # type: ignore[no-untyped-call]

    def ranks(self, model: nn.Module, plain: Ranks) -> "TensorRanks":
        """Return a process's part of the run of a model that `divide` has divided."""
        del model
        assert self.mesh is not None
        given = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return TensorRanks(**{**given, "devices": self.mesh.get_group(REPLICAS)}, degree=self.degree)


def cuts_of(config: ModelConfig, degree: int) -> dict[str, tuple[Cut, ...]]:
    """Return name -> what each of `degree` processes holds of a matrix of a block: rows, or columns of those that write."""
    queries, keys, inner = config.heads * config.head_width, config.kv_heads * config.head_width, config.mlp_width
    sizes = {"qkv": (0, (queries, keys, keys)), "attention_out": (1, (queries,)),
             "mlp_in": (0, (inner,) * (2 if config.gated_mlp else 1)), "mlp_out": (1, (inner,))}
    return {name: tuple(Cut(dimension, _ranges(parts, place, degree)) for place in range(degree))
            for name, (dimension, parts) in sizes.items()}


def _ranges(sizes: Sequence[int], place: int, degree: int) -> tuple[tuple[int, int], ...]:
    """Return the range of each of several fused projections that one process holds."""
    starts = itertools.accumulate(sizes, initial=0)
    return tuple((start + place * size // degree, start + (place + 1) * size // degree)
                 for start, size in zip(starts, sizes, strict=False))


def _pieces(whole: Tensor, cut: Cut) -> list[Tensor]:
    """Return the views of a whole tensor that a cut consists of."""
    return [whole.narrow(cut.dimension, first, end - first) for first, end in cut.ranges]


# ------------------------------------------------------------------------------------------------ linears


class DividedLinear(nn.Linear):
    """This process's part of a linear."""

    group: ProcessGroup
    divides_bias: ClassVar[bool]

    @classmethod
    def of(cls, whole: Any, cuts: tuple[Cut, ...], group: ProcessGroup) -> Self:
        """Return this process's part of a whole linear."""
        linear = cls(whole.in_features, whole.out_features, bias=whole.bias is not None, device="meta")
        linear.weight = _part_of(whole.weight, cuts, group)
        if whole.bias is not None:
            linear.bias = _part_of(whole.bias, cuts, group) if cls.divides_bias else whole.bias
        linear.group = group
        return linear.train(whole.training)


class ReadingLinear(DividedLinear):
    """Some rows of a linear: its input is whole in all processes, and the gradient of that is summed over them."""

    divides_bias = True

    def forward(self, x: Tensor) -> Tensor:
        # first in the type of the products, so that gradients are exchanged in it
        return super().forward(_SumBackward.apply(x.to(compute_dtype(x)), self.group))  # type: ignore[no-untyped-call]


class WritingLinear(DividedLinear):
    """Some columns of a linear: its product is summed over the processes, and the bias is added once."""

    divides_bias = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SumForward.apply(F.linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _part_of(whole: Tensor, cuts: tuple[Cut, ...], group: ProcessGroup) -> nn.Parameter:
    described = Part(tuple(whole.shape), cuts, group)
    weight = nn.Parameter(torch.cat(_pieces(whole.detach(), described.cut), described.cut.dimension), whole.requires_grad)
    setattr(weight, PART, described)
    return weight


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(product)
        with exchanging():
            dist.all_reduce(product, group=group)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the processes of a group."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    with exchanging():
        dist.all_reduce(total, group=group)
    return total


# ------------------------------------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class TensorRanks(GroupRanks):
    """One process of a run in which groups of `degree` neighbours compute each pass together. `devices`: the same parts."""

    degree: int = 1

    lockstep: ClassVar[bool] = True

    @property
    def replicas(self) -> int:
        """Return the groups of processes, each of which holds the whole model."""
        return self.world // self.degree

    @property
    def shard(self) -> tuple[int, int] | None:
        return (self.rank, self.degree) if self.rank < self.degree else None     # other groups hold the same

    def share(self, parts: Sequence[T], costs: Sequence[int]) -> list[T]:
        return Ranks(self.rank // self.degree, self.replicas).share(parts, costs)

    def sum(self, tensors: Iterable[Tensor]) -> None:
        if self.replicas > 1:
            super().sum(tensors)

    def total(self, *numbers: Number) -> tuple[Number, ...]:
        """Return the sum of each number over the groups, all processes of which have the same numbers."""
        counts = self.rank % self.degree == 0
        return super().total(*(number if counts else type(number)() for number in numbers))

    def first(self, value: T | None) -> T | None:
        if not super().total(int(value is not None))[0]:
            return None
        return next(found for found in self.each(value) if found is not None)
