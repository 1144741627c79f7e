"""Linears whose weights are not trained, in whatever dtype they are stored.

A frozen weight meets two products, one forward and one backward, and both may need it in another dtype than it has.
Autograd would keep the converted copy from the forward pass to the backward pass: for a whole model, a second set of
weights. Here it is made again instead, and since nothing is handed to autograd to keep, activation checkpointing also
has no reason to compute the product again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_dtype(x: Tensor) -> torch.dtype:
    """What products with `x` are computed in: autocast's dtype where that is on, else the dtype of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FrozenProduct(torch.autograd.Function):
    """x (T, in) times the matrix (out, in) that `matrix(dtype)` makes, which is called again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: Callable[[torch.dtype], Tensor],
                dtype: torch.dtype) -> Tensor:
        # not save_for_backward: checkpointing would run the product again only to hand over a matrix it does not change
        ctx.matrix, ctx.given, ctx.dtype = matrix, x.dtype, dtype
        return F.linear(x.to(dtype), matrix(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return (gradient.to(ctx.dtype) @ ctx.matrix(ctx.dtype)).to(ctx.given), None, None, None


def frozen_product(x: Tensor, bias: Tensor | None, matrix: Callable[[torch.dtype], Tensor]) -> Tensor:
    """x (T, in) -> (T, out) in `compute_dtype(x)`; only x gets a gradient."""
    out: Tensor = FrozenProduct.apply(x, bias, matrix, compute_dtype(x))  # type: ignore[no-untyped-call]
    return out


class FrozenLinear(nn.Linear):
    """A linear that is not trained. It computes in autocast's dtype, else in that of its input."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """The same weights, not copied, and frozen."""
        frozen = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        frozen.weight, frozen.bias = linear.weight, linear.bias
        frozen.requires_grad_(False)
        return frozen

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """(out, in) in `dtype`: the weight itself where it has that."""
        return self.weight.to(dtype)

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def is_stored_in(self, dtype: torch.dtype) -> bool:
        """Whether `matrix(dtype)` costs nothing."""
        return self.weight.dtype == dtype

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        if self.is_stored_in(dtype):
            return F.linear(x.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))
        return frozen_product(x, self.bias, self.matrix)
