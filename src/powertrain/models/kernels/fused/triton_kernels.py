"""The elementwise stretches of a block as Triton kernels: each reads and writes a token's numbers once.

For where torch's compiler is missing, or does not fuse. Arithmetic is fp32 whatever the tensors' type. Each method of
`TritonParts` computes what the method of `Parts` with the same name defines. Only this file imports Triton. What has no
kernel runs as `Parts` has it.

One program has one token's row (norms), a piece of it (SwiGLU), or one head of a token (rotary). `place` is where a row
begins, in 64 bits: a batch has more than 2^31 numbers sooner than one thinks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.models.kernels.fused.parts import Normalised, NormWeights, Parts

PIECE = 1024                                 # numbers of a row that one program of SwiGLU has


@triton.jit
def _normalise_rows(x: tl.tensor, added: tl.tensor, weight: tl.tensor, joined: tl.tensor, n: tl.tensor, rates: tl.tensor,
                    h: tl.tensor, width: tl.tensor, epsilon: tl.tensor, HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row * width + columns
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(joined + place, value, mask=inside)
    rate = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + epsilon)
    normal = value * rate
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(n + place, normal.to(n.dtype.element_ty), mask=inside)
    tl.store(h + place, (normal * scale).to(h.dtype.element_ty), mask=inside)
    tl.store(rates + row, rate)


@triton.jit
def _normalise_rows_back(dh: tl.tensor, n: tl.tensor, rates: tl.tensor, weight: tl.tensor, dx: tl.tensor,
                         out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row * width + columns
    normal = tl.load(n + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    dn = tl.load(dh + place, mask=inside, other=0.0).to(tl.float32) * scale
    along = tl.sum(dn * normal, axis=0) / width
    above = tl.load(dx + place, mask=inside, other=0.0)
    tl.store(out + place, above + tl.load(rates + row) * (dn - normal * along), mask=inside)


@triton.jit
def _swiglu_rows(inner: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(inner + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_rows_back(inner: tl.tensor, dout: tl.tensor, out: tl.tensor, dinner: tl.tensor, width: tl.tensor,
                      BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(inner + 2 * row * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + (2 * row + 1) * width + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(dout + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    act = gate * share
    slope = share * (1.0 + gate * (1.0 - share))
    tl.store(out + row * width + columns, (act * up).to(out.dtype.element_ty), mask=inside)
    tl.store(dinner + 2 * row * width + columns, (given * up * slope).to(dinner.dtype.element_ty), mask=inside)
    tl.store(dinner + (2 * row + 1) * width + columns, (given * act).to(dinner.dtype.element_ty), mask=inside)


@triton.jit
def _turn_heads(x: tl.tensor, cosines: tl.tensor, sines: tl.tensor, out: tl.tensor, token_stride: tl.tensor,
                head_stride: tl.tensor, table_stride: tl.tensor, heads: tl.tensor, half: tl.tensor, rest: tl.tensor,
                BLOCK: tl.constexpr, REST: tl.constexpr) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = x + token * token_stride + head * head_stride
    target = out + (token * heads + head) * (2 * half + rest)
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    left = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half + columns, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cosines + token * table_stride + columns, mask=inside, other=0.0)
    s = tl.load(sines + token * table_stride + columns, mask=inside, other=0.0)
    tl.store(target + columns, (left * c - right * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half + columns, (right * c + left * s).to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        others = tl.arange(0, REST)
        beyond = others < rest
        passed = tl.load(source + 2 * half + others, mask=beyond, other=0.0)
        tl.store(target + 2 * half + others, passed.to(out.dtype.element_ty), mask=beyond)


@dataclass(frozen=True)
class TritonParts(Parts):
    """RMS norms with the residual, SwiGLU and rotary positions, forward and backward. Not to be compiled on top."""

    def _join_normalise(self, x: Tensor, branch: Tensor, seed: Tensor | None, norm: NormWeights,
                        dtype: torch.dtype) -> tuple[Tensor, Normalised, Tensor]:
        if self._is_rms(norm) and seed is None and not self.config.parallel_residual:
            return self._add_and_normalise(x, branch, norm, dtype)
        return super()._join_normalise(x, branch, seed, norm, dtype)

    def _normalise(self, x: Tensor, norm: NormWeights, dtype: torch.dtype) -> tuple[Normalised, Tensor]:
        return self._add_and_normalise(x, None, norm, dtype)[1:] if self._is_rms(norm) else super()._normalise(x, norm, dtype)

    def _add_and_normalise(self, x: Tensor, added: Tensor | None, norm: NormWeights,
                           dtype: torch.dtype) -> tuple[Tensor, Normalised, Tensor]:
        """Return x + `added` (T, d) fp32 (x itself if None), what the RMS norm of that sum saves, and the norm's result h."""
        x = x.contiguous()
        rows, width = x.shape
        joined = x if added is None else torch.empty_like(x)
        n, h = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
        rates = x.new_empty(rows, 1)
        _normalise_rows[rows,](x, x if added is None else added.contiguous(), norm.weight, joined, n, rates, h, width,
                               self.config.norm_epsilon, HAS_ADDED=added is not None, **_whole_row(width))
        return joined, Normalised(n, rates), h

    def _normalise_back(self, dx: Tensor, dh: Tensor, normalised: Normalised, norm: NormWeights) -> Tensor:
        if not self._is_rms(norm):
            return super()._normalise_back(dx, dh, normalised, norm)
        out = torch.empty_like(dx, memory_format=torch.contiguous_format)
        rows, width = dx.shape
        _normalise_rows_back[rows,](dh.contiguous(), normalised.n.contiguous(), normalised.rate, norm.weight, dx.contiguous(),
                                    out, width, **_whole_row(width))
        return out

    def _act(self, inner: Tensor) -> Tensor:
        if not self._is_swiglu:
            return super()._act(inner)
        rows, width = len(inner), inner.shape[1] // 2
        out = inner.new_empty(rows, width)
        _swiglu_rows[rows, triton.cdiv(width, PIECE)](inner.contiguous(), out, width, BLOCK=_piece(width))
        return out

    def _act_back(self, inner: Tensor, dact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self._is_swiglu:
            return super()._act_back(inner, dact, dtype)
        rows, width = len(inner), inner.shape[1] // 2
        out, dinner = inner.new_empty(rows, width, dtype=dtype), inner.new_empty(rows, 2 * width, dtype=dtype)
        _swiglu_rows_back[rows, triton.cdiv(width, PIECE)](inner.contiguous(), dact.contiguous(), out, dinner, width,
                                                           BLOCK=_piece(width))
        return out, dinner

    def _turn(self, x: Tensor, cosines: Tensor, sines: Tensor, dtype: torch.dtype) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        tokens, heads, width = x.shape
        half = cosines.shape[-1] // 2
        rest = width - 2 * half
        cosines, sines = cosines.contiguous(), sines.contiguous()
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        _turn_heads[tokens, heads](x, cosines, sines, out, x.stride(0), x.stride(1), cosines.shape[-1], heads, half, rest,
                                   BLOCK=triton.next_power_of_2(half), REST=triton.next_power_of_2(rest) if rest else 0)
        return out

    def _is_rms(self, norm: NormWeights) -> bool:
        return self.config.norm == "rms" and norm.bias is None

    @property
    def _is_swiglu(self) -> bool:
        return self.config.gated_mlp and self.config.activation == "silu"


def _piece(width: int) -> int:
    return min(PIECE, int(triton.next_power_of_2(width)))


def _whole_row(width: int) -> dict[str, int]:
    """Return how a program has a row of `width` numbers: from 4,096 on in eight warps, so that a thread has half as many.

    With four, 16,384 numbers spill (Triton 3.7).
    """
    block = int(triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": 8 if block >= 4096 else 4}
