"""The loss of rows: cross-entropy from what the model's head reads. A technique may compute the same another way.

With `Terms` the loss is (1 - s) n + s u + z y^2 for each row, where y is the logarithm of the softmax's normaliser, n the
cross-entropy, u the cross-entropy against a uniform distribution, s the label smoothing and z the weight of the z-loss.
Sources: Szegedy et al. 2016, arXiv:1512.00567, section 7 (label smoothing); Chowdhery et al. 2022, arXiv:2204.02311,
section 5 (z-loss).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from powertrain.models.kernels.chunked_loss import Terms
from powertrain.models.model import Model
from powertrain.records import IGNORE


class Loss(Protocol):
    """How the loss of rows is computed."""

    def __call__(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None,
                 terms: Terms | None = None) -> Tensor:
        """Return the sum over the targets (R,) that are not IGNORE, from hidden (R, width); fp32.

        `trained` is the number of those targets as the host knows it; without it a loss may have to ask the device. The sum
        is () cross-entropy; with `terms` it is (3,): the loss with its terms, cross-entropy, and y^2. Only the first of the
        three has a gradient.
        """


def token_loss(model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None,
               terms: Terms | None = None) -> Tensor:
    """Return the cross-entropy in nats from all logits at once. See `Loss`."""
    logits = model.logits(hidden).float()    # (R, V)
    if terms is None:
        return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    counts = targets != IGNORE
    normaliser = logits.logsumexp(-1)        # (R,)
    plain = normaliser - logits.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    rows = (1 - terms.label_smoothing) * plain + terms.z_loss * normaliser.square()
    if terms.label_smoothing:
        rows = rows + terms.label_smoothing * (normaliser - logits.mean(-1))
    with torch.no_grad():
        others = [(plain * counts).sum(), (normaliser.square() * counts).sum()]
    return torch.stack([(rows * counts).sum(), *others])


def loss_of_all_rows(loss: Loss) -> Loss:
    """Return the same loss without leaving rows out: who records the work does not know how many rows have a target.

    A loss that leaves rows out says by `loss_of_all` how it is computed without.
    """
    if loss is token_loss:
        return loss
    found: Loss | None = getattr(getattr(loss, "__self__", None), "loss_of_all", None)
    if found is None:
        raise ValueError(f"{loss!r} does not say how it is computed over a constant number of rows")
    return found
