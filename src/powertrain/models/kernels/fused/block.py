"""A block's forward and backward pass as one autograd function, around whichever attention kernel is in force.

Memory: what the backward pass needs is held by the function itself and let go as soon as it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powertrain.models.kernels.attention import Attention
from powertrain.models.kernels.fused.parts import Parts
from powertrain.models.kernels.fused.saving import Saved, Saving
from powertrain.models.kernels.fused.values import Entered, EnteredBack, Left, LeftBack, Seeds, Wanted
from powertrain.models.kernels.fused.weights import Weights
from powertrain.models.linear import compute_dtype
from powertrain.models.model import Rotary


@dataclass(frozen=True)
class Functions:
    """Parts, compiled or as they are."""

    enter: Callable[..., tuple[Tensor, Entered]]
    leave: Callable[..., tuple[Tensor, Left]]
    leave_back: Callable[..., LeftBack]
    enter_back: Callable[..., EnteredBack]
    enter_back_of_first: Callable[..., EnteredBack]  # where nobody reads the gradient of the input: too little to be compiled

    @classmethod
    def of(cls, parts: Parts, change: Callable[[Any], Any] = lambda function: function) -> Functions:
        return cls(change(parts.enter), change(parts.leave), change(parts.leave_back), change(parts.enter_back),
                   parts.enter_back)


@dataclass(frozen=True)
class HandWritten:
    """One block, to be called as `decoder.Block.forward` is."""

    weights: Weights
    functions: Functions
    saving: Saving | None = None             # what is not simply kept for the backward pass, and how it comes back

    def __call__(self, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...], attention: Attention) -> Tensor:
        call = Call(self, rotary, lengths, attention, compute_dtype(x), self.weights.block.training)
        trained = self.weights.trained
        if torch.is_grad_enabled() and (trained or x.requires_grad):
            out: Tensor = _Block.apply(x, call, *trained)  # type: ignore[no-untyped-call]
            return out
        return call.forward(x)[0]


@dataclass(frozen=True)
class Call:
    """One block on one batch."""

    block: HandWritten
    rotary: Rotary | None
    lengths: tuple[int, ...]
    attention: Attention
    dtype: torch.dtype                       # of the products
    is_training: bool

    @property
    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        return self.rotary if self.rotary is not None else (None, None)

    def forward(self, x: Tensor, *, record: bool = False) -> tuple[Tensor, Saved]:
        """The next block's residual; with `record` the kernel's own graph is kept for `backward`."""
        weights, config = self.block.weights, self.block.weights.block.config
        copies = weights.copies(self.dtype)
        dropout = config.dropout if self.is_training else 0.0
        with torch.autocast(x.device.type, enabled=False):
            x = x.detach().float()           # what is recorded is the block, not its parts
            heads, entered = self.block.functions.enter(x, *self.tables, weights.enter(copies, self.dtype))
            q, k, v = (part.requires_grad_(record) for part in (
                heads[:, :config.heads], heads[:, config.heads:-config.kv_heads], heads[:, -config.kv_heads:]))
            with torch.set_grad_enabled(record):
                mixed = self.attention(q, k, v, self.lengths, layer=weights.block.index, dropout=dropout,
                                       window=config.window, scale=config.head_width ** -0.5)
            seeds = Seeds(draw_seed(x.device), draw_seed(x.device)) if dropout else Seeds()
            out, left = self.block.functions.leave(x, mixed.detach().flatten(1), seeds, weights.leave(copies, self.dtype))
        saved = Saved(copies, entered, (q, k, v), mixed, left, seeds)
        if record and self.block.saving is not None:
            self.block.saving.put_away(saved)
        return out, saved

    def backward(self, dx: Tensor, saved: Saved, *, needs_x: bool) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the trained weights."""
        weights, copies = self.block.weights, saved.copies
        wanted = Wanted(weights=weights.trains_whole, input=needs_x)
        functions, saving = self.block.functions, self.block.saving
        if saving is not None:
            saving.bring_left(saved, weights.leave(copies, self.dtype))
        left = functions.leave_back(dx, saved.mixed.detach().flatten(1), saved.left, saved.seeds,
                                    weights.leave(copies, self.dtype), Wanted(wanted.weights, input=True))  # one kind of call
        del saved.left
        if not (wanted.input or wanted.weights or weights.adapts("qkv")):
            return None, *weights.gradients(None, left)
        if saving is not None:
            saving.bring_entered(saved, *self.tables, weights.enter(copies, self.dtype))
        dheads = torch.autograd.grad(saved.mixed, saved.heads, left.mixed.view_as(saved.mixed))
        del saved.mixed, saved.heads
        enter_back = functions.enter_back if wanted.input or wanted.weights else functions.enter_back_of_first
        entered = enter_back(left.x, *dheads, saved.entered, *self.tables, weights.enter(copies, self.dtype), wanted)
        return entered.x, *weights.gradients(entered, left)


def draw_seed(device: torch.device) -> Tensor:
    """() int32, any number that there is."""
    return torch.empty((), dtype=torch.int64, device=device).random_(-2**31, 2**31).to(torch.int32)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *trained: Tensor) -> Tensor:
        out, ctx.saved = call.forward(x, record=True)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved is None:
            raise RuntimeError("what a block kept for its backward pass is let go as it is used, so there can be one only once")
        saved, ctx.saved = ctx.saved, None
        with torch.autocast(gradient.device.type, enabled=False):
            dx, *weights = ctx.call.backward(gradient.float(), saved, needs_x=ctx.needs_input_grad[0])
        return dx, None, *weights
