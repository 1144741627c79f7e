"""Attention alone, forward and backward, by two kernels: no products around it, no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    enough_times,
    fastest_device,
    medians,
    one_of,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart
from powertrain.models.kernels.attention import (
    Attention,
    bmm_attention,
    over_groups,
    sdpa_attention,
    varlen_attention,
    visible,
)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                    window: int | None, scale: float) -> Tensor:
    """As transformers' `eager`: products in the input's dtype with all the scores in memory, softmax in fp32."""
    del layer, dropout

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible(q.shape[2], window, q.device), float("-inf"))
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    return over_groups(q, k, v, lengths, attend)


KERNELS: Mapping[str, Attention] = {
    "eager": eager_attention, "sdpa": sdpa_attention, "bmm": bmm_attention, "varlen": varlen_attention}


def measure(context: Context, *, a: str = "eager", b: str = "sdpa", length: int = 256, documents: int = 4, heads: int = 6,
            head_width: int = 64, repeats: int = REPEATS) -> Measured:
    """Arm b over arm a, of eager, sdpa, bmm (CPU) and varlen (FlashAttention on CUDA). fp32 on a CPU, bf16 elsewhere."""
    for name, kernel in (("a", a), ("b", b)):
        one_of(name, kernel, tuple(KERNELS))
    shape = (length, documents, heads, head_width)
    rounds = apart(_rounds, context.deadline, (a, b), shape, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", a, b,
                    {"seconds": medians(rounds, (a, b)), "length": length, "documents": documents, "heads": heads,
                     "head_width": head_width})


def _rounds(deadline: float, kernels: tuple[str, str], shape: tuple[int, int, int, int], repeats: int) -> Rounds:
    device = fastest_device()
    length, documents, heads, width = shape
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    passes = [one_pass(KERNELS[kernel], (length,) * documents, heads, heads, width, dtype, device) for kernel in kernels]
    times = [enough_times(work, device) for work in passes]
    return by_turns([lambda w=work, n=count: seconds_of(w, device, n)     # type: ignore[misc]
                     for work, count in zip(passes, times, strict=True)], deadline, repeats)


def one_pass(kernel: Attention, lengths: tuple[int, ...], heads: int, kv_heads: int, width: int, dtype: torch.dtype,
             device: torch.device) -> Callable[[], None]:
    """Attention over random documents of these lengths, forward and backward."""
    q, k, v = (torch.randn(sum(lengths), count, width, device=device, dtype=dtype, requires_grad=True)
               for count in (heads, kv_heads, kv_heads))
    gradient = torch.randn_like(q)

    def work() -> None:
        out = kernel(q, k, v, lengths, layer=0, dropout=0.0, window=None, scale=width ** -0.5)
        torch.autograd.backward(out, gradient)
        q.grad = k.grad = v.grad = None

    return work
