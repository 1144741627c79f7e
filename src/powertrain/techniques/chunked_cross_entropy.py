"""Chunked cross-entropy: the logits of a few thousand rows at a time, never those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powertrain.models.decoder import Decoder
from powertrain.models.model import Model
from powertrain.records import IGNORE, Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

LOGIT_COPIES_BYTES = 12      # per logit, plain under autocast: compute type, fp32 copy, and the gradient of it
WORTH_BYTES = 64 << 20       # below this the logits are small beside everything else
WORTH_SHARE = 0.02           # of a pass's products: what skipping rows without a target has to save
CPU_STUDY = "2026-11-21_ablation-docstrings"     # 0.90 to 0.97 of the step time, where 82 % of the tokens train nothing
CPU_LOGITS = 1 << 22         # per chunk: 16 MiB in fp32, large enough for a full-speed product
GPU_LOGITS = 1 << 26         # per chunk: a GPU needs a thousand rows or so to read the head's matrix seldom enough


@dataclass(frozen=True)
class ChunkedCrossEntropy(Technique):
    """Rows that train nothing never reach the head. Each chunk's gradient is computed while its logits are at hand.

    The gradient of cross-entropy is softmax - onehot, known as soon as the logits are; so the forward pass makes the
    gradients of the hidden rows and of the head at once and keeps those instead of the logits: rows x width instead of
    rows x vocabulary. A frozen head gets no gradient at all. Same products, summed over chunks in fp32.
    """

    rows: int = 1024

    name = "chunked_cross_entropy"
    does = "computes the loss a few thousand rows at a time"
    exactness = Exactness.ROUNDING
    touches = frozenset({"loss"})
    acts_on = frozenset({"loss"})
    slot = "loss"
    source = "Liger kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989); here in plain torch"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        model, data = facts.model, facts.data
        if model.provider != "native":
            return cls.refuse(f"the model is computed by {model.provider}, which makes all scores at once")
        tokens = data.train_batch_size * data.block
        whole_bytes = tokens * model.vocabulary * LOGIT_COPIES_BYTES
        rows = max(64, (CPU_LOGITS if facts.hardware.device == "cpu" else GPU_LOGITS) // model.vocabulary)
        shown = f"the logits of a batch take {whole_bytes / 2**20:,.0f} MiB ({tokens:,} tokens x {model.vocabulary:,})"
        skipped = (1 - data.trained_share) * model.head_parameters / (model.matmul_parameters + model.head_parameters)
        if data.trained_share < 1:
            shown += f", and {1 - data.trained_share:.0%} of them train nothing: {skipped:.0%} of the products"
        if whole_bytes < WORTH_BYTES and skipped < WORTH_SHARE:
            return cls.refuse(f"{shown}; under {WORTH_BYTES >> 20} MiB and {WORTH_SHARE:.0%}", possible=cls(rows))
        chunk_bytes = min(rows, tokens) * model.vocabulary * LOGIT_COPIES_BYTES
        basis = "guess: memory by formula, time not measured yet" if not skipped else \
            "guess: what rows without a target save by formula, the rest not measured yet"
        low, high = 0.9 * (1 - skipped), 1.02 * (1 - skipped / 2)
        if skipped and facts.hardware.device == "cpu":
            high = 1.02 * (1 - skipped / 3)
            basis = f"formula: rows without a target; the high end by study {CPU_STUDY}"
        return Proposal(cls(rows), because=f"{shown}; {rows:,} rows at a time take {chunk_bytes / 2**20:,.0f} MiB",
                        claim=Effect((low, high), chunk_bytes - whole_bytes, basis=basis))

    @classmethod
    def variants(cls, facts: Facts, recipe: Recipe) -> Sequence[Technique | None]:
        answer = cls.propose(facts, recipe)
        found = answer.technique if isinstance(answer, Proposal) else answer.possible
        if not isinstance(found, cls):
            return ()
        tokens = facts.data.train_batch_size * facts.data.block      # more rows than that are all at once
        return None, found, *(cls(rows) for rows in (found.rows // 4, 4 * found.rows) if 0 < rows < tokens)

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"techniques.chunked_cross_entropy.rows={self.rows} must be at least 1")

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, loss=self.loss)

    def confirm(self, setup: Setup) -> None:
        if getattr(setup.loss, "__self__", None) != self:
            raise NotApplied(f"chunked_cross_entropy: the loss is computed by {setup.loss!r}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, loss_chunk_rows=self.rows)

    def loss(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None) -> Tensor:
        """See `setup.Loss`: cross-entropy in nats."""
        counts = targets != IGNORE
        places = counts.nonzero() if trained is None else torch.nonzero_static(counts, size=trained)
        return self._loss(model, hidden, targets, places.squeeze(1))

    def loss_of_all(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None) -> Tensor:
        """The same with every row sent to the head, so that no shape depends on the targets."""
        return self._loss(model, hidden, targets, None)

    def _loss(self, model: Model, hidden: Tensor, targets: Tensor, places: Tensor | None) -> Tensor:
        assert isinstance(model, Decoder)                # no other model has a head of its own; see propose
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        weight = model.head_weight                       # (V, width), in the dtype that it is stored in
        if not torch.is_grad_enabled():                  # a Function would still be asked for the gradients of weights
            hidden, weight = hidden.detach(), weight.detach()
        loss: Tensor = _ChunkedLoss.apply(hidden, weight, targets, self.rows, dtype, places)  # type: ignore[no-untyped-call]
        return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype,
                places: Tensor | None) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return _forward(ctx, hidden, weight, targets, rows, dtype, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        (scale,) = gradients
        hidden_gradient, weight_gradient = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        return (None if hidden_gradient is None else hidden_gradient * scale.to(hidden_gradient.dtype),
                None if weight_gradient is None else weight_gradient.mul_(scale), None, None, None, None)


def _forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype,
             places: Tensor | None) -> Tensor:
    """`places` (N,) of the targets that train; None = every row goes to the head, and those that do not train weigh nothing."""
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    head = weight.to(dtype)                              # (V, width)
    hidden_gradient = torch.zeros_like(hidden) if wants_hidden else None
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
    total = torch.zeros((), device=hidden.device)
    counts = targets != IGNORE
    for chunk in torch.split(torch.arange(len(targets), device=targets.device) if places is None else places, rows):
        x, target = hidden[chunk].to(dtype), targets[chunk].clamp(min=0)
        logits = (x @ head.T).float()                    # (rows, V)
        normaliser = logits.logsumexp(-1, keepdim=True)  # (rows, 1)
        losses = normaliser.squeeze(1) - logits.gather(1, target[:, None]).squeeze(1)
        total += (losses * counts[chunk] if places is None else losses).sum()
        if not (wants_hidden or wants_weight):
            continue
        gradient = logits.sub_(normaliser).exp_()        # softmax
        gradient[torch.arange(len(target), device=target.device), target] -= 1
        if places is None:
            gradient *= counts[chunk][:, None]
        small = gradient.to(dtype)
        if hidden_gradient is not None:
            hidden_gradient[chunk] = (small @ head).to(hidden.dtype)
        if weight_gradient is not None:
            weight_gradient += small.T @ x
    ctx.save_for_backward(hidden_gradient, weight_gradient)
    return total
