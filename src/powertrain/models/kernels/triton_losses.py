"""Cross-entropy of rows as one Triton kernel: it reads logits twice and writes their gradient over them.

torch's operators go eight times over them, mostly in fp32. Here arithmetic is fp32 whatever the logits' type, and the gradient
is rounded once, as in losses.plain_rows, which defines the result. One program has one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from powertrain.models.kernels.losses import Terms
from powertrain.records import IGNORE

PIECE = 8192                                 # logits of a row that a program has at a time


@triton.jit
def _cross_entropy_rows(logits: tl.tensor, targets: tl.tensor, losses: tl.tensor, rows: tl.tensor, vocabulary: tl.tensor,
                        smoothing: tl.tensor, z_loss: tl.tensor, IGNORED: tl.constexpr, HAS_TERMS: tl.constexpr,
                        HAS_GRADIENT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    place = logits + row.to(tl.int64) * vocabulary
    target = tl.load(targets + row)
    counts = target != IGNORED
    target = tl.where(counts, target, 0)
    columns = tl.arange(0, BLOCK)
    largest = tl.load(place).to(tl.float32)
    exponentials = 0.0
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        y = tl.load(place + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(y, axis=0))
        exponentials = exponentials * tl.exp(largest - higher) + tl.sum(tl.exp(y - higher), axis=0)
        largest = higher
        if HAS_TERMS:
            total += tl.sum(tl.where(inside, y, 0.0), axis=0)
    normaliser = largest + tl.log(exponentials)
    plain = normaliser - tl.load(place + target).to(tl.float32)
    if HAS_TERMS:
        smooth = smoothing * (normaliser - total / vocabulary)
        whole = (1.0 - smoothing) * plain + z_loss * normaliser * normaliser + smooth
        tl.store(losses + row, tl.where(counts, whole, 0.0))
        tl.store(losses + rows + row, tl.where(counts, plain, 0.0))
        tl.store(losses + 2 * rows + row, tl.where(counts, normaliser * normaliser, 0.0))
    else:
        tl.store(losses + row, tl.where(counts, plain, 0.0))
    if HAS_GRADIENT:
        for first in range(0, vocabulary, BLOCK):
            inside = first + columns < vocabulary
            y = tl.load(place + first + columns, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(y - normaliser)
            if HAS_TERMS:
                gradient = gradient * (1.0 + 2.0 * z_loss * normaliser) - smoothing / vocabulary
            gradient = tl.where(first + columns == target, gradient - (1.0 - smoothing), gradient)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(place + first + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def triton_rows(logits: Tensor, targets: Tensor, terms: Terms | None, *, gradient: bool,
                every: bool) -> tuple[Tensor, Tensor | None]:
    """Compute what losses.plain_rows does, of contiguous logits."""
    del every
    rows, vocabulary = logits.shape
    losses = torch.empty((rows,) if terms is None else (3, rows), dtype=torch.float32, device=logits.device)
    given = terms or Terms()
    _cross_entropy_rows[rows,](logits, targets, losses, rows, vocabulary, given.label_smoothing, given.z_loss, IGNORED=IGNORE,
                               HAS_TERMS=terms is not None, HAS_GRADIENT=gradient, **piece(vocabulary))
    return losses, logits if gradient else None


def piece(vocabulary: int) -> dict[str, int]:
    """Return how much of a row a program has at a time, and how many warps share it."""
    block = min(PIECE, int(triton.next_power_of_2(vocabulary)))
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 256))}
