"""Frozen linears: in whatever dtype they are stored, or in 8 bits, with products of 8-bit numbers.

A frozen weight meets two products, one forward and one backward, and both may need it in another dtype than it has.
Autograd would keep the converted copy from the forward pass to the backward pass: for a whole model, a second set of
weights. Here it is made again instead, and since nothing is handed to autograd to keep, activation checkpointing also
has no reason to compute the product again.

A frozen base in 8 bits, whose products are products of 8-bit numbers: int8, or fp8 (e4m3), with a scale for each row.

Stored are codes C (out, in) and a scale for each row of them, W ~ diag(w) C. What meets them is rounded as it comes, each
token with a scale of its own, X ~ diag(x) Q. Scales stand outside of the sums, and so lose nothing:

    Y  = X W^T  ~ diag(x) (Q C^T) diag(w)
    dX = dY W   = (dY diag(w)) C ~ diag(g) (G C)            dY diag(w) rounded token by token, as X is

One copy of the codes therefore serves both passes: the backward pass sums over the rows of W, whose scales go into dY first.
Sums of int8 products are whole numbers in int32; those of fp8 are fp32. Adapters read X as it was.

A token in which one number is a hundred times the others has little left for these in int8. Which products suffer is
measured on real tokens before anything is stored, and those stay as they are (`Coarse`).

Source: Dettmers et al. 2022, arXiv:2208.07339 (a scale for each row; outliers); Wortsman et al. 2023, arXiv:2304.13013
(8-bit products forward and for dX); Micikevicius et al. 2022, arXiv:2209.05433 (fp8).
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.shapes import takes_eight_bits

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}          # not -128: codes are symmetric
LEAST_SCALE = 1e-30                          # of a row of zeros
FEWEST_ROWS = 17                             # that CUDA's int8 product takes (torch._int_mm)
MOST_KINDS = 3                               # of blocks, by what is left in them: each is compiled apart, and torch limits that
NAMES = {INT8: "int8", FP8: "fp8"}           # as facts and plans have them
TRIED_TOKENS = 512                           # enough to meet the outliers, which sit in the same columns of all tokens
# Relative, of a product's results. Normal numbers lose 0.01 to 0.015 in int8 and 0.04 in e4m3, whose 3 bits round each number
# alike, outliers or not. More than this is a token whose largest number leaves the others few of the 255 values.
WORST_ERROR = {INT8: 0.05, FP8: 0.08}


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that products with `x` are computed in: autocast's where that is on, else the dtype of `x`."""
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
    """Return x (T, in) times the matrix: (T, out) in `compute_dtype(x)`; only x gets a gradient."""
    out: Tensor = FrozenProduct.apply(x, bias, matrix, compute_dtype(x))  # type: ignore[no-untyped-call]
    return out


class FrozenLinear(nn.Linear):
    """A linear that is not trained. It computes in autocast's dtype, else in that of its input."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """Return a frozen linear with the weights of `linear`, not copied."""
        frozen = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        frozen.weight, frozen.bias = linear.weight, linear.bias
        frozen.requires_grad_(False)
        return frozen

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (out, in) in `dtype`: the weight itself where it has that dtype."""
        return self.weight.to(dtype)

    @property
    def device(self) -> torch.device:
        return next(itertools.chain(self.parameters(), self.buffers())).device

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        if self.weight is not None and self.weight.dtype == dtype:
            return F.linear(x.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))
        return frozen_product(x, self.bias, self.matrix)


# ------------------------------------------------------------------------------------------------ products in 8 bits


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of x (rows, columns) in `dtype`, and the scales that they are to be multiplied by, (rows, 1) fp32."""
    scales = x.abs().amax(-1, keepdim=True).float().clamp(min=LEAST_SCALE) / LARGEST[dtype]
    codes = x / scales                       # fp32, whatever x is
    return (codes.round_() if dtype is INT8 else codes).to(dtype), scales


def scaled_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return x (T, in) times the matrix of `codes` (out, in) and `scales` (out,): (T, out), fp32, or bf16 if codes are fp8."""
    rounded, rows = quantise(x, codes.dtype)
    if codes.dtype is INT8:
        return _whole_sums(rounded, codes.t()).float().mul_(rows).mul_(scales)
    return torch._scaled_mm(rounded, codes.t(), rows, scales[None], out_dtype=torch.bfloat16)


def scaled_product_back(dy: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the gradient of x, (T, in), from that of the product, dy (T, out)."""
    rounded, rows = quantise(dy * scales, codes.dtype)
    if codes.dtype is INT8:
        return _whole_sums(rounded, codes).float().mul_(rows)
    return torch._scaled_mm(rounded, _along_the_sum(codes), rows, rows.new_ones(1, codes.shape[1]), out_dtype=torch.bfloat16)


def _whole_sums(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x (T, K) times matrix (K, N), int8 -> int32."""
    if x.device.type == "cpu":
        return torch._int_mm(x, matrix)
    rows = x if len(x) >= FEWEST_ROWS else F.pad(x, (0, 0, 0, FEWEST_ROWS - len(x)))
    return torch._int_mm(rows, _along_the_sum(matrix))[:len(x)]


def _along_the_sum(matrix: Tensor) -> Tensor:
    """Return `matrix` (K, N) with each column in one piece: a GPU's 8-bit units read both operands along the sum.

    For int8, cuBLAS refuses another layout on some GPUs (pytorch#169956). A copy for each use, so that only one stands.
    """
    return matrix.t().contiguous().t()


class ScaledProduct(torch.autograd.Function):
    """x (T, in) -> (T, out) in `dtype`; only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        # not save_for_backward: see FrozenProduct
        ctx.codes, ctx.scales, ctx.given = codes, scales, x.dtype
        y = scaled_product(x, codes, scales)
        return (y if bias is None else y.add_(bias)).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return scaled_product_back(gradient, ctx.codes, ctx.scales).to(ctx.given), None, None, None, None


class ScaledLinear(FrozenLinear):
    """A frozen linear in 8 bits. It has no `weight`; `matrix` makes one, for whoever needs the numbers (DoRA)."""

    codes: Tensor                            # (out, in)
    scales: Tensor                           # (out,) fp32

    @classmethod
    def of(cls, linear: nn.Linear, dtype: torch.dtype = INT8) -> Self:
        scaled = super().of(linear)
        scaled.weight = None  # type: ignore[assignment]
        codes, scales = quantise(linear.weight.detach(), dtype)
        scaled.register_buffer("codes", codes, persistent=False)
        scaled.register_buffer("scales", scales.flatten(), persistent=False)
        return scaled

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.float() * self.scales[:, None]).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = ScaledProduct.apply(  # type: ignore[no-untyped-call]
            x, self.bias, self.codes, self.scales, compute_dtype(x))
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move codes and scales when `.to` calls this; they keep their dtypes, whatever dtype is asked for."""
        codes, scales = self.codes, self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.codes, self.scales = codes.to(self.codes.device), scales.to(self.codes.device)
        return self


class LeftLinear(FrozenLinear):
    """One that was tried and left as it was, because 8 bits cost its product `error`, or do not suit its sizes (None)."""

    error: float | None = None


def frozen_linears(model: nn.Module) -> dict[str, FrozenLinear]:
    """Return the frozen linears inside the blocks, by name; the head and any other linear outside the blocks is left out."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, FrozenLinear) and name.startswith("blocks.")}


# ------------------------------------------------------------------------------------------------ a whole base


@dataclass(frozen=True)
class Coarse:
    """What became of a base's linears."""

    scaled: tuple[str, ...]
    left: Mapping[str, float | None]         # name -> the error for which it was left, None for its sizes

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> Self:
        found = frozen_linears(model)
        return cls(tuple(name for name, linear in found.items() if isinstance(linear, ScaledLinear)
                         and linear.codes.dtype is dtype),
                   {name: linear.error for name, linear in found.items() if isinstance(linear, LeftLinear)})

    def __str__(self) -> str:
        text = f"{len(self.scaled)} frozen matrices are in 8 bits"
        if not self.left:
            return text
        errors = {name: error for name, error in self.left.items() if error is not None}
        odd = len(self.left) - len(errors)
        worst = max(errors, key=lambda name: errors[name], default="")
        text += f", and {len(self.left)} stay as they were"
        text += f": their products would be off by up to {errors[worst]:.1%}, that of {worst} the most" if errors else ""
        return text + (f"; the sizes of {odd} do not suit" if odd else "")


def scale_base(model: nn.Module, dtype: torch.dtype, try_out: Callable[[], object], *, otherwise: torch.dtype) -> None:
    """Replace the frozen linears of the blocks by 8-bit ones, in place and one after the other.

    `try_out` runs the model once on tokens such as it will meet. Those that lose more than WORST_ERROR of their results then
    stay, in the dtype `otherwise`.
    """
    found = {name: linear for name, linear in frozen_linears(model).items() if linear.weight is not None}
    suited = {name: linear for name, linear in found.items()
              if takes_eight_bits(linear.out_features, linear.in_features, NAMES[dtype], linear.device.type)}
    with measured(suited, dtype) as errors:
        try_out()
    leave = _of_few_kinds({name for name in found if errors.get(name, torch.inf) > WORST_ERROR[dtype]}, found)
    for name, linear in found.items():
        if name not in leave:
            model.set_submodule(name, ScaledLinear.of(linear, dtype))
        else:
            left = LeftLinear.of(linear)
            left.error = errors.get(name)
            left.weight.data = left.weight.data.to(otherwise)
            model.set_submodule(name, left)


def _of_few_kinds(leave: set[str], names: Iterable[str]) -> set[str]:
    """Return the names not to store in 8 bits: `leave`, or all names in its blocks if those would be of too many kinds."""
    kinds: dict[str, set[str]] = {}
    for name in leave:
        _, block, inside = name.split(".", 2)
        kinds.setdefault(block, set()).add(inside)
    if len(set(map(frozenset, kinds.values()))) < MOST_KINDS:
        return leave
    return {name for name in names if name.split(".")[1] in kinds}


@contextmanager
def measured(linears: Mapping[str, FrozenLinear], dtype: torch.dtype) -> Iterator[dict[str, float]]:
    """Yield, by name, the relative error that 8 bits would cause in each linear's results, filled in as the model runs."""
    errors: dict[str, float] = {}

    def look(name: str, linear: FrozenLinear, x: Tensor) -> None:
        errors[name] = max(errors.get(name, 0.0), product_error(x.detach(), linear.weight, dtype))

    hooks = [linear.register_forward_pre_hook(lambda module, given, name=name: look(name, module, given[0]))
             for name, linear in linears.items()]
    try:
        yield errors
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def product_error(x: Tensor, weight: Tensor, dtype: torch.dtype) -> float:
    """Return |Y' - Y| / |Y|, where Y = x weight^T in fp32, and Y' is that product with both operands rounded to 8 bits."""
    with torch.autocast(x.device.type, enabled=False):
        exact = F.linear(x.float(), weight.float())
        codes, scales = quantise(weight, dtype)
        error = scaled_product(x, codes, scales.flatten()).float() - exact
        return float(error.norm() / exact.norm().clamp(min=LEAST_SCALE))
