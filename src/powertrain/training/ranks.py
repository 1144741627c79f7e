"""This process's part of a run: one process, or one of several that train the same model on the same steps.

`Ranks` is the plain case, a run of one process. `GroupRanks` is one process of a torch.distributed group: each process
computes some of a step's forward passes, and `sum_step` adds up gradients and loss before the update, so that every process
makes the same update. Only the writer saves, appends events and prints; the others wait for it at a `barrier`.

Two kinds of numbers are exchanged. Tensors stay on the device. Counts and decisions are Python values and travel through a
group of the host, so that no process waits for its device.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from powertrain.records.errors import LostPeer, NotApplied, first_line
from powertrain.shapes import BUCKET_BYTES
from powertrain.training.stalls import Watch, watching

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Number = TypeVar("Number", int, float)
ANSWERS_WITHIN = timedelta(minutes=10)       # of another process, before the run ends: a step, an evaluation or a save


@dataclass(frozen=True)
class Ranks:
    """The processes of a run as one of them sees them. This class itself is a run of one process: nothing is exchanged."""

    rank: int = 0
    world: int = 1                           # processes

    lockstep: ClassVar[bool] = False         # a pass of one process needs one of every other: they exchange weights in it
    in_stages: ClassVar[bool] = False        # each process computes some blocks of every pass, and holds no others

    @property
    def is_writer(self) -> bool:
        """Return whether this process writes the run's files and shows its events."""
        return self.rank == 0

    def share(self, parts: Sequence[T], costs: Sequence[int]) -> list[T]:
        """Return the parts of a step that this process computes, in their order. `costs` are tokens."""
        loads, mine = [0] * self.world, []
        for place in sorted(range(len(parts)), key=lambda place: (-costs[place], place)):
            least = loads.index(min(loads))
            loads[least] += costs[place]
            if least == self.rank:
                mine.append(place)
        return [parts[place] for place in sorted(mine)]

    @property
    def shard(self) -> tuple[int, int] | None:
        """Return which shard of a checkpoint this process writes, from 0, and how many there are; None for one without."""
        return (0, 1) if self.is_writer else None

    def abreast(self, passes: Sequence[T], spare: Callable[[], T]) -> Iterator[tuple[T, bool]]:
        """Yield this process's passes, each with whether it counts. In lockstep a process with fewer passes repeats `spare`."""
        return ((one, True) for one in passes)

    def put_away(self) -> None:
        """Free the weights of other processes that passes have gathered, where weights are divided."""

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes. All processes give tensors of the same shapes and types."""

    def total(self, *numbers: Number) -> tuple[Number, ...]:
        """Return the sum of each number over all processes."""
        return numbers

    def of_step(self, *counts: int) -> tuple[int, ...]:
        """Return the counts of a whole step, from those of the passes that this process has."""
        return counts if self.in_stages else self.total(*counts)

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of a step's gradients, () fp32, from that of the gradients that this process updates with."""
        return own

    def agree(self, value: T) -> T:
        """Return the writer's value on every process."""
        return value

    def each(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of ranks, on every process."""
        return [value]

    def first(self, value: T | None) -> T | None:
        """Return on every process the first value that is not None, in the order of ranks; None where there is none."""
        return value

    def barrier(self) -> None:
        """Return when all processes have come here."""

    @contextlib.contextmanager
    def watched(self, run: Path) -> Iterator[Self]:
        """Yield these ranks; a process that does not get on leaves its stacks in the run's folder. See stalls.py."""
        yield self

    def check_room(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise the allocator's error where `sum_step` would not get the memory of its largest bucket."""

    def sum_step(self, parameters: Iterable[nn.Parameter], means: Iterable[Tensor]) -> None:
        """Replace the gradients, and the loss and metrics of a step, by their sums over all processes."""


ALONE = Ranks()


@dataclass(frozen=True)
class GroupRanks(Ranks):
    """One process of a torch.distributed group. See `joined`."""

    devices: "ProcessGroup | None" = None      # exchanges tensors; None: the default group
    hosts: "ProcessGroup | None" = None        # exchanges Python values; None: the default group
    within: timedelta = ANSWERS_WITHIN
    watch: Watch | None = None

    def sum(self, tensors: Iterable[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            with self._exchanging():
                torch.distributed.all_reduce(flat, group=self.devices)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_([tensor.detach() for tensor in bucket],
                                 [part.view(tensor.shape) for part, tensor in zip(parts, bucket, strict=True)])

    def total(self, *numbers: Number) -> tuple[Number, ...]:
        sums = torch.tensor(numbers, dtype=torch.int64 if all(isinstance(one, int) for one in numbers) else torch.float64)
        with self._exchanging():
            torch.distributed.all_reduce(sums, group=self.hosts)
        return tuple(sums.tolist())

    def agree(self, value: T) -> T:
        values = [value]
        with self._exchanging():
            torch.distributed.broadcast_object_list(values, src=0, group=self.hosts)
        return values[0]

    def each(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        with self._exchanging():
            torch.distributed.all_gather_object(values, value, group=self.hosts)
        return values

    def first(self, value: T | None) -> T | None:
        if not self.total(int(value is not None))[0]:
            return None
        return next(found for found in self.each(value) if found is not None)

    def barrier(self) -> None:
        with self._exchanging():
            torch.distributed.barrier(group=self.hosts)

    @contextlib.contextmanager
    def watched(self, run: Path) -> Iterator[Self]:
        with watching(run, self.rank, self.within.total_seconds()) as watch:
            yield replace(self, watch=watch)

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Exchange values with the other processes inside. Raises LostPeer where one of them does not answer."""
        try:
            yield
        except RuntimeError as error:
            raise LostPeer(first_line(error)) from error
        if self.watch is not None:
            self.watch.renew()

    def check_room(self, parameters: Iterable[nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad and not self.lockstep]
        if trained:
            largest_bytes = max(min(BUCKET_BYTES, sum(one.nbytes for one in trained)), *(one.nbytes for one in trained))
            torch.empty(largest_bytes, dtype=torch.uint8, device=trained[0].device)

    def sum_step(self, parameters: Iterable[nn.Parameter], means: Iterable[Tensor]) -> None:
        """Sum means and gradients over processes. A weight that has a gradient on no process gets none.

        A weight that has a gradient on some processes only counts as one with zeros on the others.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        having = self.total(*(int(parameter.grad is not None) for parameter in trained))
        summed = [parameter for parameter, processes in zip(trained, having, strict=True) if processes]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum([*means, *(parameter.grad for parameter in summed if parameter.grad is not None)])


def joined(within: timedelta = ANSWERS_WITHIN) -> Ranks:
    """Return this process's part of the run: of torch.distributed's default group, or alone where there is none.

    `within`: a process that does not answer for so long is lost; that of the default group is set where the group is made.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ALONE
    hosts = None if torch.distributed.get_backend() == "gloo" else torch.distributed.new_group(backend="gloo", timeout=within)
    return GroupRanks(torch.distributed.get_rank(), torch.distributed.get_world_size(), hosts=hosts, within=within)


def joined_as_planned(technique: str, processes: int) -> Ranks:
    """Return what `joined` does. Raises NotApplied where the technique was planned for another number of processes."""
    ranks = joined()
    if ranks.world != processes:
        raise NotApplied(f"{technique}: the plan is for {processes} processes, and this run has {ranks.world}")
    return ranks


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in their order, cut where the type changes or BUCKET_BYTES are reached."""
    buckets: list[list[Tensor]] = []
    held_bytes = 0
    for tensor in tensors:
        if not buckets or held_bytes + tensor.nbytes > BUCKET_BYTES or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(tensor)
        held_bytes += tensor.nbytes
    return buckets
