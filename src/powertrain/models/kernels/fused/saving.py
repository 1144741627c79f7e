"""What a block does not keep between its passes: tensors that are made again, or that wait in the host's memory.

By default a block written by hand keeps the least that spares every product. Where that does not fit, each kind of tensor
is worth what it takes to compute it again, per byte: its contraction length.

  inner        what the MLP's first product gave: a product of contraction length d, from the norm's result
  heads        queries, keys and values: the same, from the other norm's result
  mixed        what attention gave: never made again; it may wait in the host's memory
  normalised   what the two norms gave: what the others are made from; it may wait in the host's memory

An elementwise result is not among them: none is kept in the first place. The down projection is never made again, because
nothing needs what it gave. A tensor that others refer to (autograd, inside attention) keeps its place and gives its memory
back; before anybody looks, its numbers are there again.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from powertrain.models.kernels.fused.parts import Entered, EnterWeights, LeaveWeights, Left, Parts, Seeds

Copies = Mapping[str, tuple[Tensor, Tensor | None]]      # linear -> weight and bias, or its adapters' joined a and b
AHEAD = 4                                    # tensors that are on their way back while a block computes: about a block's


@dataclass
class Saved:
    """Between a call's two passes. The backward pass deletes what it has used."""

    copies: Copies
    dtype: torch.dtype                       # of the products
    tables: tuple[Tensor | None, Tensor | None]              # of rotary positions
    entered: Entered
    heads: tuple[Tensor, Tensor, Tensor]     # q, k and v, from which `mixed` was recorded
    mixed: Tensor
    left: Left
    seeds: Seeds
    away: dict[str, Any] = field(default_factory=dict)       # what `Saving.put_away` needs to bring a tensor back


@dataclass
class Count:
    """What was really put away, for who wants to know."""

    put_away: int = 0                        # tensors; of the two norms' results of a block, the pair counts once


@dataclass(frozen=True)
class Saving:
    """`actions`: kind -> "recompute" or "offload"; other kinds are kept. `change`: compiles, as for the block's own parts."""

    actions: Mapping[str, str]
    host: Host
    inner: Callable[..., Tensor] = field(repr=False)
    heads: Callable[..., Tensor] = field(repr=False)
    count: Count = field(default_factory=Count, compare=False)

    @classmethod
    def of(cls, actions: Mapping[str, str], host: Host, parts: Parts,
           change: Callable[[Any], Any] = lambda function: function) -> Saving:
        return cls(actions, host, change(parts.inner_again), change(parts.heads_again))

    def put_away(self, saved: Saved) -> None:
        """After the forward pass. In the order in which it is needed last."""
        for name, kind, tensor in ((("entered", "normalised", saved.entered.normalised.n), ("heads", "heads", saved.heads[0]),
                                    ("inner", "inner", saved.left.inner), ("mixed", "mixed", saved.mixed),
                                    ("left", "normalised", saved.left.normalised.n))):
            if kind not in self.actions or not _is_alone(tensor, saved.heads if kind == "heads" else (tensor,)):
                continue
            whole = _whole(tensor)
            saved.away[name] = self.host.put(whole) if self.actions[kind] == "offload" else None
            whole.untyped_storage().resize_(0)
            self.count.put_away += name != "entered"

    def bring_left(self, saved: Saved, weights: LeaveWeights) -> None:
        """What the backward pass of the half after attention reads."""
        self._bring(saved, "left", saved.left.normalised.n)
        self._bring(saved, "mixed", saved.mixed)
        if "inner" in saved.away and self.actions["inner"] == "recompute":
            del saved.away["inner"]
            saved.left = saved.left._replace(inner=self.inner(saved.left.normalised.n, weights))
        else:
            self._bring(saved, "inner", saved.left.inner)

    def bring_entered(self, saved: Saved, weights: EnterWeights) -> None:
        """What attention's backward pass reads, and that of the half before it."""
        self._bring(saved, "entered", saved.entered.normalised.n)
        if "heads" in saved.away and self.actions["heads"] == "recompute":
            del saved.away["heads"]
            _refill(saved.heads[0], self.heads(saved.entered.normalised.n, *saved.tables, weights))
        else:
            self._bring(saved, "heads", saved.heads[0])

    def _bring(self, saved: Saved, name: str, tensor: Tensor) -> None:
        if name in saved.away:
            _refill(tensor, self.host.fetch(saved.away.pop(name)))


@dataclass(frozen=True)
class PlainHost:
    """The machine's memory, without haste: what a GPU's is tested against, and all there is on a CPU."""

    def put(self, tensor: Tensor) -> Tensor:
        """Copies the numbers of a contiguous tensor, whose memory is about to be given back."""
        return torch.empty_like(tensor, device="cpu").copy_(tensor)

    def fetch(self, stay: Tensor) -> Tensor:
        """The numbers, in any memory."""
        return stay


def _is_alone(tensor: Tensor, parts: tuple[Tensor, ...]) -> bool:
    """Whether its memory holds nothing but these."""
    return tensor.untyped_storage().nbytes() == sum(part.numel() * part.element_size() for part in parts)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory as one row of numbers, which autograd does not see changing."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def _refill(tensor: Tensor, numbers: Tensor) -> None:
    """Gives a tensor its memory back, with these numbers in it."""
    tensor.untyped_storage().resize_(numbers.numel() * numbers.element_size())
    _whole(tensor).copy_(numbers.flatten(), non_blocking=True)


@dataclass(eq=False)
class Stay:
    """One tensor that is out."""

    pinned: Tensor                           # on the host
    device: torch.device
    moved: Any                               # event: the last copy of it is done
    back: Tensor | None = None               # on the device, once its way back has begun


class PinnedHost:
    """The host's memory beside a CUDA device: copies run on a stream of their own while the device computes.

    Going out, a tensor is copied to pinned memory once the computing stream has made it; its device memory is not handed out
    again before that is done. Coming back, the tensors that are needed next are copied while the current block computes: they
    come back in the reverse of the order in which they went, as backward passes do. Pinned buffers are kept for the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out: list[weakref.ref[Stay]] = []      # of a pass that failed, nothing stays
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def put(self, tensor: Tensor) -> Stay:
        """Begins to copy a contiguous row of numbers; see `PlainHost`."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            free = self._free[tensor.numel(), tensor.dtype]
            # the copy out of a buffer that comes back is older on the same stream than the one into it
            pinned = free.pop() if free else torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            moved = self._stream.record_event()
        tensor.record_stream(self._stream)   # its memory is about to be given back, and this copy still reads it
        stay = Stay(pinned, tensor.device, moved)
        self._out = [other for other in self._out if other() is not None] + [weakref.ref(stay)]
        return stay

    def fetch(self, stay: Stay) -> Tensor:
        """The numbers; the next ones are on their way."""
        self._begin(stay)
        self._out.remove(weakref.ref(stay))
        for reference in self._out[:-AHEAD - 1:-1]:
            if (following := reference()) is not None:
                self._begin(following)
        computing = torch.cuda.current_stream(stay.device)
        computing.wait_event(stay.moved)
        assert stay.back is not None
        stay.back.record_stream(computing)
        self._free[stay.pinned.numel(), stay.pinned.dtype].append(stay.pinned)
        back, stay.back = stay.back, None
        return back

    def _begin(self, stay: Stay) -> None:
        if stay.back is None:
            with torch.cuda.stream(self._stream):
                stay.back = stay.pinned.to(stay.device, non_blocking=True)
                stay.moved = self._stream.record_event()


Host = PlainHost | PinnedHost
