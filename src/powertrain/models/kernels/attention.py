"""Attention kernels: five ways to the same numbers, chosen by a technique.

A kernel takes q (T, H, D), k and v (T, K, D) of documents laid end to end, and gives (T, H, D); each token attends
within its own document, to itself and what came before (with a window W: to the last W tokens, itself included). Each
of the K kv heads serves H / K query heads. `dropout` is the share of attention weights dropped, 0 in evaluation, and
`layer` the block's index, for kernels that remember (generation's key/value cache).

  math     the definition, in fp32: what the others are tested against
  bmm      batched products over tiles that fit the CPU's cache: see bmm.py
  ragged   flash attention for a CPU over documents of any lengths, in C++ that is compiled at its first use: see ragged/
  sdpa     torch's scaled_dot_product_attention, one call for each length that occurs
  varlen   FlashAttention over cumulative lengths, whatever they are: CUDA, half precision

`OverEnds` is attention whose shapes say nothing of the documents: where they end is a tensor, read by the device. A pass that
is recorded once and replayed (training/replayed_passes.py) can differ from the recorded one in what its tensors hold, not in
their shapes and not in any number that Python passes to a kernel. So documents are given by `ends`, of a constant count,
empty ones last, and by the length that none of them exceeds.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from powertrain.models.kernels import bmm
from powertrain.models.kernels.ragged import attention as ragged
from powertrain.records import WrongUse
from powertrain.shapes import fused_attention, gpu_attention


class Attention(Protocol):
    """A kernel; see the module docstring for shapes."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor: ...


@lru_cache(maxsize=256)
def group_lengths(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (documents, their length) of each batch that can be computed as one, the shortest first; no empty documents."""
    return tuple((count, length) for length, count in sorted(Counter(lengths).items()) if length)


@lru_cache(maxsize=16)                       # passes, each with two numbers a token
def order_on(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the tokens' order with documents sorted by length, and its inverse: (T,) int64 each; None if sorted already."""
    if tuple(sorted(lengths)) == lengths:
        return None
    with torch.inference_mode(False):        # so that a later backward pass may keep them
        counts = torch.tensor(lengths)
        order = torch.argsort(counts.repeat_interleave(counts), stable=True)
        return order.to(device), torch.argsort(order).to(device)


@lru_cache(maxsize=256)
def index_on(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `tokens` as (T,) int64 on the device, made outside inference mode, so that a later backward pass may keep it."""
    with torch.inference_mode(False):
        return torch.tensor(tokens, device=device)


def over_groups(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...],
                attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Call `attend` on each group of equally long documents, as (N, H, L, D) views; the result is (T, H, D) again."""
    orders = order_on(lengths, q.device)
    if orders is not None:
        q, k, v = (x.index_select(0, orders[0]) for x in (q, k, v))
    groups = group_lengths(lengths)
    outputs, first = [], 0
    for count, length in groups:
        last = first + count * length
        # a slice's gradient is a copy; on a CPU that keeps one layout, for which compiled code is compiled once
        of_group = (q, k, v) if len(groups) == 1 and q.is_cuda else (x[first:last] for x in (q, k, v))
        batch = (torch.unflatten(x, 0, (count, length)).transpose(1, 2) for x in of_group)
        outputs.append(attend(*batch).transpose(1, 2).flatten(0, 1))
        first = last
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if orders is None else out.index_select(0, orders[1])


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return (L, L) bool: True where the row sees the column."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def math_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                   window: int | None, scale: float) -> Tensor:
    """Compute attention by its definition: softmax(q k^T * scale, masked) v, all of it in fp32."""
    del layer

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
        with torch.autocast(q.device.type, enabled=False):
            scores = q.float() @ k.transpose(-1, -2) * scale
            hidden = ~visible(q.shape[2], window, q.device)
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
            return (F.dropout(weights, dropout) if dropout else weights) @ v

    return over_groups(q, k, v, lengths, attend).to(q.dtype)


def bmm_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                  window: int | None, scale: float) -> Tensor:
    """Compute attention in tiled batched products, on the CPU in fp32, bf16 or fp16. Raises WrongUse for anything else."""
    del layer
    if q.device.type != "cpu" or q.element_size() not in (2, 4):
        raise WrongUse(f"bmm attention is laid out for the CPU's caches in fp32 or bf16, and got {q.dtype} on "
                       f"{q.device.type}; use sdpa there")
    out: Tensor = bmm.attend(q, k, v, lengths, dropout, window, scale)[0]
    return out


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                     window: int | None, scale: float) -> Tensor:
    """Compute our own flash attention, on the CPU. Raises WrongUse elsewhere, and for types and widths it does not have."""
    del layer
    out: Tensor = ragged.attend(q, k, v, lengths, dropout, window, scale)[0]
    return out


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                   window: int | None, scale: float) -> Tensor:
    """Call torch's fused attention once for each length that occurs; a window shorter than the documents needs a mask."""
    del layer

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slides = window is not None and window < q.shape[2]
        mask = visible(q.shape[2], window, q.device) if slides else None
        return torch_attention(q, k, v, mask, dropout, scale)

    return over_groups(q, k, v, lengths, attend)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """Call torch's attention on q (N, H, L, D) and k, v (N, K, S, D), causal where there is no mask.

    Keys and values are repeated for each query head where torch's fused kernel cannot do it; with `enable_gqa` torch would
    fall back to storing the weights of all pairs.
    """
    chosen = kernel_of_torch(q.device, q.element_size(), q.shape[-1], masked=mask is not None)
    if q.shape[1] != k.shape[1] and chosen == "efficient":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout,
                                          scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@lru_cache(maxsize=64)
def kernel_of_torch(device: torch.device, nbytes: int, head_width: int, *, masked: bool) -> str:
    """Return the kernel that torch's attention should take on this device: "flash", "efficient" or "math"."""
    if device.type != "cuda":
        return gpu_attention(fused_attention(device.type, None, ""), 2, head_width, masked=False)
    hip = torch.version.hip is not None
    architecture = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0] if hip else ""
    fused = fused_attention("cuda", None if hip else torch.cuda.get_device_capability(device), architecture)
    return gpu_attention(fused, nbytes, head_width, masked=masked)


def torch_falls_back(device: torch.device, dtype: torch.dtype, head_width: int, *, masked: bool) -> bool:
    """Return whether torch takes no fused kernel for a training pass on this CUDA device, though one is expected."""
    if kernel_of_torch(device, dtype.itemsize, head_width, masked=masked) == "math":
        return False
    q = torch.zeros(1, 1, 16, head_width, device=device, dtype=dtype, requires_grad=True)
    mask = visible(16, 8, device) if masked else None
    asked = cuda.SDPAParams(q, q, q, mask, 0.0, not masked, False)
    return not any(can_use(asked) for can_use in (cuda.can_use_flash_attention, cuda.can_use_efficient_attention,
                                                  cuda.can_use_cudnn_attention))


def find_varlen() -> Callable[..., Any] | None:
    """Return torch's variable-length FlashAttention, or None where this torch has none, or none with fewer kv heads than heads.

    Source: pytorch#179468, which added `enable_gqa`; torch 2.11 has the kernel without it.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


@lru_cache(maxsize=256)
def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each document starts, and the end: (documents + 1,) int32."""
    with torch.inference_mode(False):
        return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                     window: int | None, scale: float) -> Tensor:
    """Compute FlashAttention over documents of any lengths in one call.

    Raises WrongUse off CUDA, without half precision, with dropout, and where torch does not have the kernel.
    """
    del layer
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        raise WrongUse(f"varlen attention needs bf16 or fp16 on a CUDA device, and got {q.dtype} on {q.device.type}; "
                       f"use sdpa or bmm there")
    if dropout:
        raise WrongUse(f"varlen attention cannot drop attention weights, and dropout is {dropout}; use sdpa, or "
                       f"dropout=0")
    return varlen_over_ends(q, k, v, cumulative_lengths(lengths, q.device), max(lengths), window, scale)


# ------------------------------------------------------------------------------------------------ over ends

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, int | None, float], Tensor]     # see masked_over_ends


@dataclass(frozen=True)
class OverEnds:
    """An attention kernel that reads where documents end from a tensor, and no lengths."""

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
    """Return the one that computes what `attention` does."""
    return varlen_over_ends if attention is varlen_attention else masked_over_ends


def masked_over_ends(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, window: int | None, scale: float) -> Tensor:
    """Compute attention by its definition, in fp32, with a mask over the whole pass: the reference for `varlen_over_ends`.

    q (T, H, D), k and v (T, K, D) of documents that end at `ends`, of at most `longest` tokens: (T, H, D).
    """
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
    """Compute what `masked_over_ends` does, by FlashAttention. Raises WrongUse where torch does not have the kernel."""
    kernel = find_varlen()
    if kernel is None:
        raise WrongUse(f"torch {torch.__version__} has no torch.nn.attention.varlen with enable_gqa; use sdpa, or torch 2.12 "
                       "or newer")
    out: Tensor = kernel(q, k, v, ends, ends, longest, longest, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
                         window_size=(-1 if window is None else window - 1, 0))
    return out
