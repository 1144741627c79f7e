"""The kernel as a function and as an operator of torch; see attention.h for what it computes and how.

It reads queries, keys and values where they lie, takes documents as they are, and keeps of the forward pass its result and
a number per row and head. Which weights dropout keeps is a function of a seed, made again in the backward pass.
Legend: T tokens, H heads, K kv heads, D head width.
"""

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from powertrain.models.kernels import build
from powertrain.models.kernels.bmm import differentiable
from powertrain.records import WrongUse

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Problem(ctypes.Structure):
    """As attention.h declares it."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("heads", "kv_heads", "width", "documents")),
                *((name, ctypes.c_void_p) for name in ("starts", "order")),
                *((name, ctypes.c_int64) for name in ("q_stride", "k_stride", "v_stride", "dq_stride", "dk_stride", "window")),
                ("scale", ctypes.c_float), ("dropout", ctypes.c_float), ("seed", ctypes.c_uint64)]


def ragged_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], dropout: float, window: int | None,
                   scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return for q (T, H, D), k and v (T, K, D) the mixed values (T, H, D), the logs of the rows' sums (T, H), and a seed.

    Raise WrongUse where the kernel cannot compute that.
    """
    check(q.device.type, q.dtype, q.shape[2])
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, sums = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2])
    seed = torch.empty((), dtype=torch.int64)
    seed.random_(-2**63, None) if dropout else seed.zero_()
    problem = _problem(q, k, v, tuple(lengths), dropout, window, scale, seed)
    _call("forward", problem, q, k, v, out, sums)
    return out, sums, seed


def ragged_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: Tensor,
                    lengths: Sequence[int], dropout: float, window: int | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    gradient, q, k, v = gradient.contiguous(), _rows(q), _rows(k), _rows(v)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    problem = _problem(q, k, v, tuple(lengths), dropout, window, scale, seed)
    _call("backward", problem, gradient, q, k, v, out, sums, dq, dk, dv)
    return dq, dk, dv


@cache                                       # an error is not kept
def check(device: str, dtype: torch.dtype, width: int) -> None:
    """Raise WrongUse where the kernel cannot run: in the operator, not before it, so that torch.compile does not trace it."""
    reason = f"it runs on a CPU, not on {device}" if device != "cpu" else \
        f"it computes in fp32 and bf16, not in {dtype}" if dtype not in DTYPES else \
        f"it takes heads of an even width, not of {width}" if width % 2 else \
        "this CPU has no products in bf16" if dtype is torch.bfloat16 and not build.load(build.RAGGED).has_bf16() else None
    if reason is not None:
        raise WrongUse(f"ragged attention cannot run: {reason}; use bmm or sdpa")


def _rows(x: Tensor) -> Tensor:
    """Return x as the kernel reads it: a token's heads side by side, in a copy where they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _call(name: str, problem: Problem, *tensors: Tensor) -> None:
    function = getattr(build.load(build.RAGGED), f"{name}_{DTYPES[tensors[0].dtype]}")
    if function(ctypes.byref(problem), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)):
        raise MemoryError(f"not enough memory for the attention kernel's {name} pass")


def _problem(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], dropout: float, window: int | None, scale: float,
             seed: Tensor) -> Problem:
    starts, order = documents_of(lengths)
    if starts[-1] != len(q):
        raise ValueError(f"documents of {starts[-1]} tokens in a batch of {len(q)}")
    return Problem(q.shape[1], k.shape[1], q.shape[2], len(lengths), ctypes.addressof(starts), ctypes.addressof(order),
                   q.stride(0), k.stride(0), v.stride(0), q.shape[1:].numel(), k.shape[1:].numel(), window or 0, scale, dropout,
                   int(seed) % 2**64)


@lru_cache(maxsize=64)
def documents_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """Return where each document starts, with the end; and the documents, the longest first, so that threads end together."""
    starts = (ctypes.c_int64 * (len(lengths) + 1))(*itertools.accumulate(lengths, initial=0))
    order = (ctypes.c_int64 * len(lengths))(*sorted(range(len(lengths)), key=lambda document: -lengths[document]))
    return starts, order


def _results(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], dropout: float, window: int | None,
             scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty((), dtype=torch.int64)


attend = differentiable("ragged_attention", ragged_forward, ragged_backward, _results)
