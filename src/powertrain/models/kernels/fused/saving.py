"""What a block does not keep between its passes: tensors that are made again, or that wait in the host's memory.

By default a block written by hand keeps the least that spares every product. Where that does not fit, each kind of tensor
is worth what it takes to make it again, per byte: its contraction length (performance.md 3.2).

  inner        what the MLP's first product gave: a product of contraction length d, from the norm's result
  heads        queries, keys and values: the same, from the other norm's result
  mixed        what attention gave: never made again; it may wait in the host's memory
  normalised   what the two norms gave: what the others are made from; it may wait in the host's memory

An elementwise result is not among them: none is kept in the first place. The down projection is never made again, because
nothing needs what it gave. A tensor that others refer to (autograd, inside attention) keeps its place and gives its memory
back; before anybody looks, its numbers are there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from powertrain.models.kernels.fused.parts import Parts, product
from powertrain.models.kernels.fused.values import EnterWeights, LeaveWeights, NormWeights

if TYPE_CHECKING:
    from powertrain.models.kernels.fused.block import Saved

KINDS = ("inner", "heads", "mixed", "normalised")
RECOMPUTABLE = ("inner", "heads")
AHEAD = 4                                    # tensors that are on their way back while a block computes: about a block's


class Host(Protocol):
    """Memory that is not the device's."""

    def put(self, tensor: Tensor) -> Any:
        """Begins to copy the numbers of a contiguous tensor, whose memory is about to be given back."""

    def fetch(self, stay: Any) -> Tensor:
        """The numbers, in new memory of the device."""


@dataclass(frozen=True)
class Again:
    """What makes tensors again, from what is kept and the weights."""

    parts: Parts

    def inner(self, n: Tensor, weights: LeaveWeights) -> Tensor:
        return product(_scaled(n, weights.norm), weights.mlp_in)[0]

    def heads(self, n: Tensor, cosines: Tensor | None, sines: Tensor | None, weights: EnterWeights) -> Tensor:
        y = product(_scaled(n, weights.norm), weights.qkv)[0]
        return self.parts.heads(y, cosines, sines, weights)[0]


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
        again = Again(parts)
        return cls(actions, host, change(again.inner), change(again.heads))

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

    def bring_entered(self, saved: Saved, cosines: Tensor | None, sines: Tensor | None, weights: EnterWeights) -> None:
        """What attention's backward pass reads, and that of the half before it."""
        self._bring(saved, "entered", saved.entered.normalised.n)
        if "heads" in saved.away and self.actions["heads"] == "recompute":
            del saved.away["heads"]
            made = self.heads(saved.entered.normalised.n, cosines, sines, weights)
            _refill(saved.heads[0], made)
        else:
            self._bring(saved, "heads", saved.heads[0])

    def _bring(self, saved: Saved, name: str, tensor: Tensor) -> None:
        if name in saved.away:
            _refill(tensor, self.host.fetch(saved.away.pop(name)))


@dataclass(frozen=True)
class PlainHost:
    """The machine's memory, without haste: what a GPU's is tested against, and all there is on a CPU."""

    def put(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu").copy_(tensor)

    def fetch(self, stay: Tensor) -> Tensor:
        return stay


def _scaled(n: Tensor, norm: NormWeights) -> Tensor:
    """A norm's result h, from what is kept of it (parts.Normalised)."""
    h = n.float() * norm.weight if norm.bias is None else n.float() * norm.weight + norm.bias
    return h.to(n.dtype)


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
