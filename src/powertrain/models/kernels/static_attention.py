"""Attention whose shapes say nothing of the documents: where they end is a tensor, read by the device.

A pass that is recorded once and replayed (training/replayed_passes.py) can differ from the recorded one in what its tensors
hold, not in their shapes and not in any number that Python passes to a kernel. So documents are given by `ends`, of a
constant count, empty ones last, and by the length that none of them exceeds.

  masked     the definition, in fp32, with a mask over the whole pass: what the other is tested against, on any device
  varlen     FlashAttention: CUDA, half precision
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from powertrain.models.kernels.attention import Attention, find_varlen, varlen_attention
from powertrain.records import WrongUse

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None, float], Tensor]     # see masked_over_ends


@dataclass(frozen=True)
class OverEnds:
    """An attention kernel (models/kernels/attention.py) that reads where documents end from a tensor, and no lengths."""

    kernel: Kernel
    ends: Tensor = field(repr=False)         # (D + 1,) int32
    longest: int                             # tokens that no document exceeds

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor:
        del lengths, layer
        if dropout:
            raise WrongUse(f"attention over a constant number of documents cannot drop weights, and dropout is {dropout:g}; "
                           "set dropout=0, or techniques.cuda_graph=off")
        return self.kernel(q, k, v, self.ends, self.longest, window, scale)


def kernel_over_ends(attention: Attention) -> Kernel:
    """The one that computes what `attention` does."""
    return varlen_over_ends if attention is varlen_attention else masked_over_ends


def masked_over_ends(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, window: int | None, scale: float) -> Tensor:
    """q (T, H, D), k and v (T, K, D) of documents that end at `ends`, of at most `longest` tokens: (T, H, D)."""
    del longest
    rows = torch.arange(len(q), device=q.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, rows, right=True)            # empty documents have no row
    distance = rows[:, None] - rows
    seen = (document[:, None] == document) & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    heads = q.shape[1]
    k, v = (x.float().repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = q.float().transpose(0, 1) @ k.transpose(-1, -2) * scale         # (H, T, T)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return (weights @ v).transpose(0, 1).to(q.dtype)


def varlen_over_ends(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, window: int | None, scale: float) -> Tensor:
    """As `masked_over_ends`, by FlashAttention."""
    kernel = find_varlen()
    if kernel is None:
        raise WrongUse(f"torch {torch.__version__} has no torch.nn.attention.varlen; use torch 2.10 or newer, or set "
                       "techniques.cuda_graph=off")
    back = -1 if window is None else window - 1
    out: Tensor = kernel(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(back, 0),
                         enable_gqa=q.shape[1] != k.shape[1])
    return out
