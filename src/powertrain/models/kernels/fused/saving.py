"""Recomputing or offloading what a hand-written block would save between its forward and its backward pass.

By default a block saves just enough that the backward pass repeats no product. Where that does not fit in memory, some kinds
of tensors are freed after the forward pass. Recomputing a product's result costs its contraction length per byte:

  inner        result of the MLP's first product: recomputed from its norm's result (contraction length d), or offloaded
  heads        queries, keys and values: the same, from the other norm's result
  mixed        result of attention: never recomputed; it may be offloaded to the host's memory
  normalised   results of the two norms, from which the others are recomputed; they may be offloaded

A block saves no elementwise result, and the backward pass does not read the result of the down projection. Autograd (inside
attention) holds references to some of these tensors. Such a tensor object stays; only its memory is freed, and it is
allocated and filled again before attention's backward pass reads it.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from powertrain.models.kernels.fused.parts import Entered, EnterWeights, LeaveWeights, Left, Seeds
from powertrain.models.kernels.slabs import Slabs, pinned

Copies = Mapping[str, tuple[Tensor, Tensor | None]]      # linear -> weight and bias, or its adapters' joined a and b
AHEAD = 4                                    # tensors that are on their way back while a block computes: about a block's


@dataclass
class Saved:
    """What a block saves in its forward pass. The backward pass deletes each part after its last use."""

    copies: Copies
    dtype: torch.dtype                       # of the products
    tables: tuple[Tensor | None, Tensor | None]              # of rotary positions
    entered: Entered
    heads: tuple[Tensor, Tensor, Tensor]     # q, k and v, from which autograd recorded `mixed`
    mixed: Tensor
    left: Left
    seeds: Seeds
    away: dict[str, Any] = field(default_factory=dict)       # tensor that was freed -> where the host has it; None: nowhere


@dataclass
class Saving:
    """`actions`: kind -> "recompute" or "offload"; other kinds are kept. `inner` and `heads` recompute, as in `Parts`."""

    actions: Mapping[str, str]
    host: "PlainHost | PinnedHost"
    inner: Callable[..., Tensor] = field(repr=False)
    heads: Callable[..., Tensor] = field(repr=False)
    freed: int = field(default=0, compare=False)             # tensors so far; the two norms' results of a block count once

    def put_away(self, saved: Saved) -> None:
        """Free what `actions` name, after the forward pass; the tensors that the backward pass reads last come first."""
        for name, kind, tensor in ((("entered", "normalised", saved.entered.normalised.n), ("heads", "heads", saved.heads[0]),
                                    ("inner", "inner", saved.left.inner), ("mixed", "mixed", saved.mixed),
                                    ("left", "normalised", saved.left.normalised.n))):
            if kind not in self.actions or not _is_alone(tensor, saved.heads if kind == "heads" else (tensor,)):
                continue
            whole = _whole(tensor)
            saved.away[name] = self.host.put(whole) if self.actions[kind] == "offload" else None
            whole.untyped_storage().resize_(0)
            self.freed += name != "entered"

    def bring_left(self, saved: Saved, weights: LeaveWeights) -> None:
        """Bring back what the backward pass of the half after attention reads."""
        self._bring(saved, "left", saved.left.normalised.n)
        self._bring(saved, "mixed", saved.mixed)
        if "inner" in saved.away and self.actions["inner"] == "recompute":
            del saved.away["inner"]
            saved.left = saved.left._replace(inner=self.inner(saved.left.normalised.n, weights))
        else:
            self._bring(saved, "inner", saved.left.inner)

    def bring_entered(self, saved: Saved, weights: EnterWeights) -> None:
        """Bring back what the backward passes of attention and of the half before it read."""
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
    """Copies within the machine's memory that block the caller: all there is on a CPU, and the reference for `PinnedHost`."""

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a contiguous tensor, whose memory is freed next."""
        return torch.empty_like(tensor, device="cpu").copy_(tensor)

    def fetch(self, stay: Tensor) -> Tensor:
        """Return the copy, on any device."""
        return stay


def _is_alone(tensor: Tensor, parts: tuple[Tensor, ...]) -> bool:
    """Return whether the tensor's storage holds these parts and nothing else, so that it may be freed."""
    return tensor.untyped_storage().nbytes() == sum(part.numel() * part.element_size() for part in parts)


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as one row. Autograd does not notice when the row is written."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def _refill(tensor: Tensor, numbers: Tensor) -> None:
    """Allocate a freed tensor's memory again and copy `numbers` into it."""
    tensor.untyped_storage().resize_(numbers.numel() * numbers.element_size())
    _whole(tensor).copy_(numbers.flatten(), non_blocking=True)


@dataclass(eq=False)
class Stay:
    """One offloaded tensor."""

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
        self._slabs = Slabs(pinned)

    def put(self, tensor: Tensor) -> Stay:
        """Begin to copy a contiguous row of numbers; see `PlainHost`."""
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            free = self._free[tensor.numel(), tensor.dtype]
            # the copy out of a buffer that comes back is older on the same stream than the one into it
            pinned = free.pop() if free else self._slabs.cut(tensor.numel(), tensor.dtype)
            pinned.copy_(tensor, non_blocking=True)
            moved = self._stream.record_event()
        tensor.record_stream(self._stream)   # its memory is about to be given back, and this copy still reads it
        stay = Stay(pinned, tensor.device, moved)
        self._out = [other for other in self._out if other() is not None] + [weakref.ref(stay)]
        return stay

    def fetch(self, stay: Stay) -> Tensor:
        """Return the tensor's numbers on the device, and begin to copy those that are needed next."""
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
