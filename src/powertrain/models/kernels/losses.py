"""The loss of rows: cross-entropy from what the model's head reads, from all logits at once or in chunks of rows.

With `Terms` the loss is (1 - s) n + s u + z y^2 for each row, where y is the logarithm of the softmax's normaliser, n the
cross-entropy, u the cross-entropy against a uniform distribution, s the label smoothing and z the weight of the z-loss.
Sources: Szegedy et al. 2016, arXiv:1512.00567, section 7 (label smoothing); Chowdhery et al. 2022, arXiv:2204.02311,
section 5 (z-loss).
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from powertrain.models.decoder import Decoder
from powertrain.models.kernels.frozen import compute_dtype
from powertrain.models.model import Model
from powertrain.records import IGNORE


class Terms(NamedTuple):
    """What is added to plain cross-entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


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
    normaliser = logits.logsumexp(-1)        # (R,)
    plain = normaliser - logits.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return (_with_terms(plain, logits, normaliser, terms) * (targets != IGNORE)).sum(-1)


class Scores(Protocol):
    """How the log-probabilities of targets are computed."""

    def __call__(self, model: Model, hidden: Tensor, targets: Tensor, trained: int) -> Tensor:
        """Return (N,) fp32: the log-probability of each of the N `trained` targets (R,) that are not IGNORE, in order."""


def token_scores(model: Model, hidden: Tensor, targets: Tensor, trained: int) -> Tensor:
    """Return the log-probabilities from all their logits at once. See `Scores`."""
    places = trained_places(targets, trained)
    logits = model.logits(hidden.index_select(0, places)).float()                # (N, V)
    return logits.gather(1, targets[places][:, None]).squeeze(1) - logits.logsumexp(-1)


def trained_places(targets: Tensor, trained: int | None) -> Tensor:
    """Return the places (N,) of the targets that are not IGNORE, without a wait for the device where their number is known."""
    counts = targets != IGNORE               # nonzero waits for the device; torch 2.11 has nothing else on MPS
    places = counts.nonzero() if trained is None or counts.device.type == "mps" else \
        torch.nonzero_static(counts, size=trained)
    return places.squeeze(1)


def scores_of(loss: Loss) -> Scores:
    """Return how targets are scored where their loss is computed in this way: a loss in chunks says so by `scores`."""
    found: Scores = token_scores if loss is token_loss else getattr(loss, "__self__").scores  # noqa: B009 - a method's object
    return found


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


class RowsLoss(Protocol):
    """How the loss of some rows and its gradient are computed from their logits."""

    def __call__(self, logits: Tensor, targets: Tensor, terms: Terms | None, *, gradient: bool,
                 every: bool) -> tuple[Tensor, Tensor | None]:
        """Return the losses (R,) in fp32, or (3, R) as in `Loss`, 0 where the target is IGNORE, and the logits' gradient.

        The gradient has the type of the logits (R, V) and may take their place; None unless `gradient`. `every`: no target is
        IGNORE.
        """


def plain_rows(logits: Tensor, targets: Tensor, terms: Terms | None, *, gradient: bool,
               every: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the loss of rows in fp32, by torch's operators. See `RowsLoss`."""
    dtype, counts, target = logits.dtype, targets != IGNORE, targets.clamp(min=0)
    logits = logits.float()
    normaliser = logits.logsumexp(-1, keepdim=True)      # (R, 1)
    losses = normaliser.squeeze(1) - logits.gather(1, target[:, None]).squeeze(1)
    if terms is not None:
        losses = _with_terms(losses, logits, normaliser.squeeze(1), terms)           # (3, R)
    losses = losses if every else losses * counts
    if not gradient:
        return losses, None
    of_logits = logits.sub_(normaliser).exp_()           # softmax
    smoothing = 0.0 if terms is None else terms.label_smoothing
    if terms is not None:
        of_logits.mul_(1 + 2 * terms.z_loss * normaliser).sub_(smoothing / of_logits.shape[1])
    of_logits[torch.arange(len(target), device=target.device), target] -= 1 - smoothing
    return losses, (of_logits if every else of_logits.mul_(counts[:, None])).to(dtype)


def chunked_loss(model: Model, hidden: Tensor, targets: Tensor, rows: int, places: Tensor | None,
                 terms: Terms | None = None, rows_loss: RowsLoss = plain_rows) -> Tensor:
    """Return the summed cross-entropy in nats as `Loss` does, `rows` rows at a time.

    `places` (N,) of the targets that train; None = every row goes to the head, so that no shape depends on the targets.
    """
    return _by_head(_ChunkedLoss, model, hidden, targets, rows, places, terms, rows_loss)


def _by_head(function: type[torch.autograd.Function], model: Model, hidden: Tensor, targets: Tensor, rows: int,
             *more: Any) -> Tensor:
    """Apply a function to the rows that the head reads, the head's weight, the targets, and what it takes more."""
    assert isinstance(model, Decoder)                # no other model has a head of its own
    dtype, weight = compute_dtype(hidden), model.head_weight     # (V, width), in the dtype that it is stored in
    if not torch.is_grad_enabled():                  # a Function would still be asked for the gradients of weights
        hidden, weight = hidden.detach(), weight.detach()
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = function.apply(hidden, weight, targets, rows, dtype, *more)  # type: ignore[no-untyped-call]
    return found


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype,
                places: Tensor | None, terms: Terms | None, rows_loss: RowsLoss) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        head = weight.to(dtype)                              # (V, width)
        hidden_gradient = torch.zeros_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = torch.zeros(() if terms is None else (3,), device=hidden.device)
        for chunk in torch.split(torch.arange(len(targets), device=targets.device) if places is None else places, rows):
            x = hidden[chunk].to(dtype)
            losses, gradient = rows_loss(x @ head.T, targets[chunk], terms, gradient=wants_hidden or wants_weight,
                                         every=places is not None)
            total += losses.sum(-1)
            if gradient is None:
                continue
            if hidden_gradient is not None:
                hidden_gradient[chunk] = (gradient @ head).to(hidden.dtype)
            if weight_gradient is not None:
                weight_gradient += gradient.T @ x
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        scale = gradients[0] if gradients[0].dim() == 0 else gradients[0][0]
        hidden_gradient, weight_gradient = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        return (None if hidden_gradient is None else hidden_gradient * scale.to(hidden_gradient.dtype),
                None if weight_gradient is None else weight_gradient.mul_(scale), None, None, None, None, None, None)


def chunked_scores(model: Model, hidden: Tensor, targets: Tensor, rows: int, places: Tensor,
                   rows_loss: RowsLoss = plain_rows) -> Tensor:
    """Return the log-probabilities (N,) of the targets at `places` as `Scores` does, `rows` rows at a time."""
    return _by_head(_ChunkedScores, model, hidden, targets, rows, places, rows_loss)


class _ChunkedScores(torch.autograd.Function):
    """Log-probabilities whose gradient by the hidden rows is made while their logits are there.

    A row's gradient is that of its own score times what comes back for it, which the forward pass does not know: so the product
    with it is made in the backward pass. The head's gradient is a sum over rows, so where the head is trained its logits are
    computed again there. A score is the loss of its row with the other sign.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype,
                places: Tensor, rows_loss: RowsLoss) -> Tensor:
        wants_hidden, ctx.wants_weight = ctx.needs_input_grad[:2]
        head, wanted = weight.to(dtype), targets[places]
        losses = torch.empty(len(places), device=hidden.device)
        by_hidden = hidden.new_empty(len(places), hidden.shape[1]) if wants_hidden else None
        for first in range(0, len(places), rows):
            chunk = slice(first, first + rows)
            x = hidden[places[chunk]].to(dtype)
            losses[chunk], gradient = rows_loss(x @ head.T, wanted[chunk], None, gradient=wants_hidden, every=True)
            if by_hidden is not None and gradient is not None:
                by_hidden[chunk] = (gradient @ head).to(hidden.dtype)
        again = (hidden, weight, wanted) if ctx.wants_weight else ()
        ctx.rows, ctx.dtype, ctx.shape, ctx.rows_loss = rows, dtype, hidden.shape, rows_loss
        ctx.save_for_backward(places, by_hidden, *again)
        return losses.neg_()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places, by_hidden, *again), factors = ctx.saved_tensors, -gradients[0][:, None]     # (N, 1)
        ctx.maybe_clear_saved_tensors()
        to_hidden = None
        if by_hidden is not None:
            to_hidden = by_hidden.new_zeros(ctx.shape).index_copy_(0, places, by_hidden * factors.to(by_hidden.dtype))
        if not ctx.wants_weight:
            return to_hidden, None, None, None, None, None, None
        hidden, weight, wanted = again
        head, to_weight = weight.to(ctx.dtype), torch.zeros_like(weight, dtype=torch.float32)
        for first in range(0, len(places), ctx.rows):
            chunk = slice(first, first + ctx.rows)
            x = hidden[places[chunk]].to(ctx.dtype)
            gradient = ctx.rows_loss(x @ head.T, wanted[chunk], None, gradient=True, every=True)[1]
            to_weight += gradient.T @ (x * factors[chunk]).to(ctx.dtype)
        return to_hidden, to_weight, None, None, None, None, None


def _with_terms(plain: Tensor, logits: Tensor, normaliser: Tensor, terms: Terms) -> Tensor:
    """Return (3, rows): the loss with its terms, cross-entropy, and the squared normaliser. Only the first has a gradient."""
    rows = (1 - terms.label_smoothing) * plain + terms.z_loss * normaliser.square()
    if terms.label_smoothing:
        rows = rows + terms.label_smoothing * (normaliser - logits.mean(-1))
    return torch.stack((rows, plain.detach(), normaliser.detach().square()))
