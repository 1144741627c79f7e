"""Passes of one shape: the same numbers from tensors whose sizes do not depend on what is in them.

Three things of a pass change from one to the next: its tokens, where its documents end, and which rows have a target. The
first are filled up to a constant number by whoever packs; the others become tensors of a constant size here (`lay_out`), on
the host, where the batch is made. Documents that are not there are empty and end where the last one ends; rows beyond those
with a target are rows without one, which weigh nothing. A pass that does not fit the shape is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from powertrain.models.kernels.chunked_loss import Terms
from powertrain.models.kernels.static_attention import OverEnds, kernel_over_ends
from powertrain.models.model import Model
from powertrain.records import IGNORE, Batch, Layout
from powertrain.training.losses import loss_of_all_rows
from powertrain.training.objective import Sums
from powertrain.training.setup import Setup

ROOM = 1.2                   # over what the passes looked at need of documents, of their length, and of rows
MULTIPLE = 64                # of rows and of lengths: what kernels work in


@dataclass(frozen=True)
class PassShape:
    """What all passes that are replayed have in common."""

    tokens: int
    documents: int                           # at most; the others are empty
    longest: int                             # tokens of a document, at most
    rows: int                                # that reach the head: those with a target, at most
    lengths: tuple[int, ...] | None = None   # where they are the same in every pass, so that any kernel will do


def shape_of(passes: Sequence[Batch], context: int | None = None) -> PassShape:
    """The shape that most of these passes fit, with room for others. `context`: what no document exceeds anyway."""
    tokens = Counter(len(batch.tokens) for batch in passes).most_common(1)[0][0]
    alike = [batch for batch in passes if len(batch.tokens) == tokens]
    rows = _roomy(max(batch.trained_tokens for batch in alike), tokens)
    lengths, longest = alike[0].lengths, max(max(batch.lengths) for batch in alike)
    if all(batch.lengths == lengths for batch in alike):
        return PassShape(tokens, len(lengths), longest, rows, lengths)
    documents = math.ceil(ROOM * max(len(batch.lengths) for batch in alike))
    return PassShape(tokens, documents, max(longest, min(_roomy(longest, tokens), context or tokens)), rows)


def _roomy(most: int, limit: int) -> int:
    return min(limit, MULTIPLE * math.ceil(ROOM * most / MULTIPLE))


def fits(batch: Batch, shape: PassShape) -> bool:
    """Whether the pass can be replayed as one of this shape."""
    if shape.lengths is not None and batch.lengths != shape.lengths:
        return False
    return (len(batch.tokens) == len(batch.targets) == shape.tokens and len(batch.lengths) <= shape.documents
            and max(batch.lengths) <= shape.longest and batch.trained_tokens <= shape.rows)


def lay_out(batch: Batch, shape: PassShape) -> Batch:
    """The batch with its layout, where it fits the shape."""
    if not fits(batch, shape):
        return batch
    ends = torch.full((shape.documents + 1,), shape.tokens, dtype=torch.int32)
    ends[:len(batch.lengths) + 1] = torch.tensor((0, *batch.lengths), dtype=torch.int32).cumsum(0)
    without = batch.targets == IGNORE
    rows = torch.argsort(without.to(torch.uint8), stable=True)[:shape.rows]      # those with a target first, in order
    return replace(batch, layout=Layout(ends, rows))


def static_sums(setup: Setup, batch: Batch, shape: PassShape) -> Sums:
    """As `Setup.sums`, from a batch that has a layout: no shape and no number in it depends on what the batch holds.

    The batch's `lengths` are read by nothing that makes numbers; they may be those of another pass.
    """
    assert batch.layout is not None
    attention, rows, all_rows = setup.attention, batch.layout.rows, loss_of_all_rows(setup.loss)
    if shape.lengths is None:
        attention = OverEnds(kernel_over_ends(attention), batch.layout.ends, shape.longest)

    def loss(model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None, terms: Terms | None = None) -> Tensor:
        more = () if terms is None else (None, terms)
        return all_rows(model, hidden.index_select(0, rows), targets.index_select(0, rows), *more)

    return replace(setup, attention=attention, loss=loss).sums(batch)
