"""Weights, gradients and optimizer state divided among the processes of a run, by torch's FSDP2 (`fully_shard`).

Each process keeps its rows of every weight. A block's weights are gathered for the time of its computation, and gradients are
summed and divided in one exchange, in the backward pass. So a pass of one process needs a pass of every other: where a process
has fewer passes of a step than the others, it repeats a small one that weighs nothing.

How much stays divided is the stage of ZeRO: 1, optimizer state alone: weights are whole during the step, gradients until its
last pass; 2, gradients too; 3, weights too. With `replicas`, processes form as many groups that divide the weights, and
gradients are summed over the groups as well (hybrid).
Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); Zhao et al. 2023, arXiv:2304.11277 (FSDP).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from powertrain.models.adapters.attached import has_adapters
from powertrain.records.errors import LostPeer, first_line
from powertrain.training.ranks import GroupRanks, Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")
GLOO = "gloo/transport"                      # in its errors, which are plain RuntimeErrors


@dataclass(frozen=True)
class Sharding:
    """How the weights of a model are divided among the processes of torch.distributed's default group."""

    stage: int = 3                           # of ZeRO
    replicas: int = 1                        # groups of processes, each of which holds the whole model

    def mesh(self, device: str) -> DeviceMesh:
        """Return the processes as FSDP2 has them: those that divide the weights or, with replicas, replicas x those."""
        from torch.distributed.device_mesh import init_device_mesh

        world = torch.distributed.get_world_size()
        shape = (world,) if self.replicas == 1 else (self.replicas, world // self.replicas)
        return init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards")[-len(shape):])

    def divide(self, model: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Leave this process its rows of every weight. Blocks are gathered one by one, all other weights with `hidden`."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = mesh or self.mesh(next(model.parameters()).device.type)
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, reshard_after_forward=self.stage == 3)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)       # its head is used once `hidden` has returned
        register_fsdp_forward_method(model, "hidden")
        for part in parts_of(model):
            # sums, not means: the loss of a pass is divided by the units of the whole step already
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)     # gloo has no other kind

    def optimizer(self, setup: Any, plain: Any) -> Any:
        """Return the RunOptimizer of a Setup that is divided so: the plain one, whose weights are divided."""
        return plain

    def ranks(self, model: nn.Module, plain: Ranks) -> ShardedRanks:
        """Return a process's part of the run of a model that `divide` has divided."""
        given = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return ShardedRanks(**given, model=model, division=self)


@dataclass(frozen=True)
class ShardedRanks(GroupRanks):
    """One process of a group that divides the weights of `model`."""

    model: Any = None                        # an FSDPModule
    division: Sharding = Sharding()

    lockstep: ClassVar[bool] = True

    @property
    def shard(self) -> tuple[int, int] | None:
        shards = self.world // self.division.replicas
        return (self.rank, shards) if self.rank < shards else None       # other replicas hold the same

    def abreast(self, passes: Sequence[T], spare: Callable[[], T]) -> Iterator[tuple[T, bool]]:
        most = max(self.each(len(passes)))
        for place in range(most):
            self.begin_pass(is_last=place == most - 1)
            yield (passes[place], True) if place < len(passes) else (spare(), False)
        self.put_away()

    def begin_pass(self, *, is_last: bool) -> None:
        """Say what the next backward pass does with gradients and with gathered weights; `is_last` of the step."""
        self.model.set_requires_gradient_sync(self.division.stage > 1 or is_last)
        self.model.set_reshard_after_backward(self.division.stage == 3 or is_last)

    def put_away(self) -> None:
        for part in parts_of(self.model):
            part.reshard()

    def sum_step(self, parameters: Iterable[nn.Parameter], means: Iterable[Tensor]) -> None:
        """Sum the means: the backward passes have summed the gradients."""
        self.sum(means)


def parts_of(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose weights are gathered together, the model itself among them."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def gathered(model: nn.Module, *, keep: bool) -> Iterator[None]:
    """Gather the weights one by one in all processes; inside, one that is to `keep` them has them in the model.

    Where there are adapters, these are gathered alone: nothing else is written.
    """
    whole: dict[Tensor, nn.Parameter] = {}
    all_of_them = not has_adapters(model)
    found = [(module, name, weight) for module in model.modules() for name, weight in module.named_parameters(recurse=False)
             if is_divided(weight) and (all_of_them or weight.requires_grad)]
    for _, _, weight in found:
        if weight not in whole:              # tied weights are in two modules
            value = whole_of(weight)
            whole[weight] = nn.Parameter(value.cpu() if keep else value.new_empty(0))
    if keep:
        for module, name, weight in found:
            setattr(module, name, whole[weight])
    try:
        yield
    finally:
        for module, name, weight in found:
            setattr(module, name, weight)


@dataclass(frozen=True)
class Cut:
    """The part of a weight that a process holds: ranges of its rows (dimension 0) or columns (1), one after the other."""

    dimension: int
    ranges: tuple[tuple[int, int], ...]      # first and last + 1, in the whole weight

    @property
    def lengths(self) -> list[int]:
        return [end - first for first, end in self.ranges]


def cut_of(weight: Tensor) -> Cut | None:
    """Return which part of a weight this process holds; None for a whole one."""
    if hasattr(weight, "part"):              # see tensor_parallel.Part
        cut: Cut = weight.part.cut
        return cut
    if not is_divided(weight):
        return None
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    shards, place = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    first = min(place * -(-weight.shape[0] // shards), weight.shape[0])      # torch.chunk's rule
    return Cut(0, ((first, first + own_part(weight).shape[0]),))


def whole_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a weight of which this process may hold a part."""
    return weight.part.shape if hasattr(weight, "part") else tuple(weight.shape)


def whole_of(weight: Tensor) -> Tensor:
    """Return a weight of which this process may hold a part, whole. All processes that hold parts call this together."""
    whole: Tensor = weight.part.join(weight.detach()) if hasattr(weight, "part") else summed(weight.detach())
    return whole


def total_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients, () fp32: parts that processes hold count once each, and whole weights once."""
    having = [parameter for parameter in parameters if parameter.grad is not None]
    divided = [parameter for parameter in having if hasattr(parameter, "part")]
    if not divided:
        return summed(_norm_of(having))
    squared: Tensor = divided[0].part.sum(_norm_of(divided).square())
    return (squared + _norm_of([one for one in having if not hasattr(one, "part")]).to(squared.device).square()).sqrt()


def _norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def divided_as(weight: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is divided as the weight is, of which `part` is this process's part."""
    if not hasattr(weight, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    like: Any = weight
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def is_divided(weight: Tensor | None) -> bool:
    """Return whether processes hold parts of the weight: a DTensor does, and a weight with a `part`."""
    return hasattr(weight, "to_local") or hasattr(weight, "part")


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a divided tensor; any other tensor as it is."""
    if not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.to_local().detach()
    return part


def summed(tensor: Tensor) -> Tensor:
    """Return a result that each process has a part of, such as the norm of divided gradients, whole on every process."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    with exchanging():
        whole: Tensor = tensor.full_tensor()
    return whole


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Exchange tensors with the other processes inside. Raises LostPeer where one of them has ended."""
    try:
        yield
    except RuntimeError as error:
        raise lost_peer(error) or error from None


def lost_peer(error: Exception) -> LostPeer | None:
    """Return what to raise in place of an exchange's error that another process has caused by ending; else None."""
    ended = isinstance(error, torch.distributed.DistError) or GLOO in str(error)
    return LostPeer(first_line(error)) if isinstance(error, RuntimeError) and ended else None
