"""The elementwise stretches of a block by our own kernel; see rows.h. What has no kernel runs as `Parts` has it."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powertrain.models.config import ACTIVATIONS
from powertrain.models.kernels.build import ROWS, load
from powertrain.models.kernels.fused.parts import Entered, EnterWeights, Normalised, NormWeights, Parts

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
INTEGER, ADDRESS = ctypes.c_int64, ctypes.c_void_p


class NormOf(ctypes.Structure):
    """As rows.h declares it."""

    _fields_ = [("weight", ADDRESS), ("bias", ADDRESS), ("epsilon", ctypes.c_float), ("is_rms", ctypes.c_int32)]


class HeadsOf(ctypes.Structure):
    """As rows.h declares it."""

    _fields_ = [*((name, INTEGER) for name in ("rows", "heads", "kv_heads", "width", "rotary_width")),
                *((name, ADDRESS) for name in ("cosines", "sines", "q_norm", "k_norm")), ("epsilon", ctypes.c_float)]


@dataclass(frozen=True)
class RowParts(Parts):
    """Norms with the residual, activations and rotary positions, forward and backward, on a CPU."""

    def heads(self, y: Tensor, cosines: Tensor | None, sines: Tensor | None,
              weights: EnterWeights) -> tuple[Tensor, Tensor | None]:
        if cosines is None or sines is None:
            return super().heads(y, cosines, sines, weights)
        c, y = self.config, y.contiguous()
        out = y if weights.q_norm is None else torch.empty_like(y)
        call("position_heads", y.dtype, self._heads_of(len(y), cosines, sines, weights), y, out)
        found, read = (x.view(len(y), c.heads + 2 * c.kv_heads, c.head_width) for x in (out, y))
        return found, None if weights.q_norm is None else read[:, :c.heads + c.kv_heads]

    def _heads_back(self, dq: Tensor, dk: Tensor, dv: Tensor, entered: Entered, cosines: Tensor | None, sines: Tensor | None,
                    weights: EnterWeights) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if cosines is None or sines is None or {dq.dtype, dk.dtype, dv.dtype} != {weights.dtype}:
            return super()._heads_back(dq, dk, dv, entered, cosines, sines, weights)
        c, raw = self.config, entered.raw
        dy = dq.new_empty(len(dq), (c.heads + 2 * c.kv_heads) * c.head_width)
        sums = torch.zeros(torch.get_num_threads(), 2, c.head_width, dtype=torch.float64)
        call("position_heads_back", dy.dtype, self._heads_of(len(dq), cosines, sines, weights), dq.contiguous(),
              dk.contiguous(), dv.contiguous(), raw, 0 if raw is None else raw.stride(0), dy, sums, len(sums))
        q_norm, k_norm = sums.sum(0).float() if raw is not None else (None, None)
        return dy, q_norm, k_norm

    def _add(self, between: Tensor, branch: Tensor, seed: Tensor | None) -> Tensor:
        if seed is not None:
            return super()._add(between, branch, seed)
        call("add", branch.dtype, *between.shape, between, branch.contiguous())         # nobody else has the residual
        return between

    def _normalise(self, x: Tensor, norm: NormWeights, dtype: torch.dtype) -> tuple[Normalised, Tensor]:
        return self._joined(x, None, norm, dtype)[1:]

    def _join_normalise(self, x: Tensor, branch: Tensor, seed: Tensor | None, norm: NormWeights,
                        dtype: torch.dtype) -> tuple[Tensor, Normalised, Tensor]:
        if seed is not None or self.config.parallel_residual or branch.dtype is not dtype:
            return super()._join_normalise(x, branch, seed, norm, dtype)
        return self._joined(x, branch, norm, dtype)

    def _joined(self, x: Tensor, added: Tensor | None, norm: NormWeights,
                dtype: torch.dtype) -> tuple[Tensor, Normalised, Tensor]:
        """Return x + `added` (T, d) fp32 (x itself if None), what its norm saves, and the norm's result h."""
        x = x.contiguous()
        joined = x if added is None else torch.empty_like(x)
        n, h, rates = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype), x.new_empty(len(x), 1)
        call("normalise", dtype, *x.shape, x, None if added is None else added.contiguous(), self._norm_of(norm), joined, n, h,
              rates)
        return joined, Normalised(n, rates), h

    def _normalise_back(self, dx: Tensor, dh: Tensor, normalised: Normalised, norm: NormWeights) -> Tensor:
        out = torch.empty_like(dx, memory_format=torch.contiguous_format)
        call("normalise_back", dh.dtype, *dx.shape, dh.contiguous(), normalised.n.contiguous(), normalised.rate,
              self._norm_of(norm), dx.contiguous(), out)
        return out

    def _act(self, inner: Tensor) -> Tensor:
        out = inner.new_empty(len(inner), self._mlp_width(inner))
        call("activate", inner.dtype, *out.shape, *self._activation, inner.contiguous(), out)
        return out

    def _act_back(self, inner: Tensor, dact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        out, dinner = inner.new_empty(len(inner), self._mlp_width(inner)), torch.empty_like(inner)
        call("activate_back", inner.dtype, *out.shape, *self._activation, inner.contiguous(), dact.contiguous(), out, dinner)
        return out.to(dtype), dinner.to(dtype)

    def _mlp_width(self, inner: Tensor) -> int:
        return inner.shape[1] // (2 if self.config.gated_mlp else 1)

    @property
    def _activation(self) -> tuple[ctypes.c_int32, ctypes.c_int32]:
        return ctypes.c_int32(ACTIVATIONS.index(self.config.activation)), ctypes.c_int32(self.config.gated_mlp)

    def _norm_of(self, norm: NormWeights) -> NormOf:
        return NormOf(norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr(), self.config.norm_epsilon,
                      self.config.norm == "rms")

    def _heads_of(self, rows: int, cosines: Tensor, sines: Tensor, weights: EnterWeights) -> HeadsOf:
        c, norms = self.config, (weights.q_norm, weights.k_norm)
        return HeadsOf(rows, c.heads, c.kv_heads, c.head_width, cosines.shape[-1], cosines.data_ptr(), sines.data_ptr(),
                       *(None if norm is None else norm.data_ptr() for norm in norms), c.norm_epsilon)


def call(name: str, dtype: torch.dtype, *arguments: Any) -> int:
    """Call a function of the kernel for a dtype of products: tensors by their addresses, structures by reference."""
    found: int = getattr(load(ROWS), f"{name}_{NAMES[dtype]}")(*map(passed, arguments))
    return found


def passed(argument: Any) -> Any:
    """Return an argument of a kernel's function as ctypes wants it."""
    if isinstance(argument, Tensor):
        return ADDRESS(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return INTEGER(argument) if isinstance(argument, int) else argument
