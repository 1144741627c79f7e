"""Chunked cross-entropy: the logits of a few thousand rows at a time, never those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Technique, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.kernels.losses import Terms
    from powertrain.models.model import Model
    from powertrain.training.setup import Setup

LOGIT_COPIES_BYTES = 12      # per logit, plain under autocast: compute type, fp32 copy, and the gradient of it
WORTH_BYTES = 64 << 20       # below this the logits are small beside everything else
WORTH_SHARE = 0.02           # of a pass's products: what skipping rows without a target has to save
CPU_STUDY = "2026-11-21_ablation-docstrings"     # 0.90 to 0.97 of the step time, where 82 % of the tokens train nothing
CPU_LOGITS = 1 << 22         # per chunk: 16 MiB in fp32, large enough for a full-speed product
GPU_LOGITS = 1 << 26         # per chunk: a GPU needs a thousand rows or so to read the head's matrix seldom enough


@dataclass(frozen=True)
class ChunkedCrossEntropy(Technique):
    """Rows without a target skip the head. Each chunk's gradient is computed while its logits are in memory.

    The gradient of cross-entropy is softmax - onehot, which the logits give at once. So the forward pass computes the gradients
    of the hidden rows and of the head, and keeps those instead of the logits: rows x width instead of rows x vocabulary.
    A frozen head gets no gradient. The products are the same, summed over chunks in fp32.
    """

    rows: int = 1024

    name = "chunked_cross_entropy"
    does = "computes the loss in chunks of rows"
    decides_by: ClassVar = {"loss_chunk_rows": "rows"}
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"loss"})
    acts_on = frozenset({"loss"})
    slots = frozenset({"loss"})
    source = "Liger kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989); here in plain torch"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model, data = run.model, run.data
        tokens = data.train_batch_size * data.block
        whole_bytes = tokens * model.vocabulary * LOGIT_COPIES_BYTES
        rows = max(64, (CPU_LOGITS if run.hardware.device == "cpu" else GPU_LOGITS) // model.vocabulary)
        shown = f"the logits of a batch take {whole_bytes / 2**20:,.0f} MiB ({tokens:,} tokens x {model.vocabulary:,})"
        skipped = (1 - data.trained_share) * model.head_parameters / (model.matmul_parameters + model.head_parameters)
        if data.trained_share < 1:
            shown += f", and skipping the {1 - data.trained_share:.0%} without a target saves {skipped:.0%} of the products"
        numbers = {"logits_bytes": whole_bytes, "skipped_share": skipped}
        if whole_bytes < WORTH_BYTES and skipped < WORTH_SHARE:
            return cls.refuse(Why.WOULD_NOT_PAY, f"{shown}; chunks pay off only above {WORTH_BYTES >> 20} MiB of logits, or "
                              f"where skipped rows save {WORTH_SHARE:.0%} of the products", cls(rows), numbers=numbers)
        chunk_bytes = min(rows, tokens) * model.vocabulary * LOGIT_COPIES_BYTES
        basis = "guess: memory by formula, time not measured yet" if not skipped else \
            "guess: a formula for the rows without a target, the rest not measured yet"
        low, high = 0.9 * (1 - skipped), 1.02 * (1 - skipped / 2)
        studied = bool(skipped) and run.hardware.device == "cpu"
        if studied:
            high = 1.02 * (1 - skipped / 3)
            basis = f"formula: rows without a target; the high end by study {CPU_STUDY}"
        return cls(rows).on(f"{shown}; {rows:,} rows at a time take {chunk_bytes / 2**20:,.0f} MiB",
                            Effect((low, high), chunk_bytes - whole_bytes, basis=basis, guessed=not studied), numbers=numbers)

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        if (found := cls.settings_of(cls.answer(run))) is None:
            return ()
        tokens = run.data.train_batch_size * run.data.block      # more rows than that are all at once
        return None, found, *(cls(rows) for rows in (found.rows // 4, 4 * found.rows) if 0 < rows < tokens)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, loss=self.loss)

    def confirm(self, setup: Setup) -> None:
        if not setup.objective.uses_loss:
            raise NotApplied(f"chunked_cross_entropy: the objective {setup.objective.name} computes a loss of its own")
        if getattr(setup.loss, "__self__", None) != self:
            raise NotApplied(f"chunked_cross_entropy: the loss is computed by {name_of(setup.loss)}")

    def loss(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None,
             terms: Terms | None = None) -> Tensor:
        """Return the loss of the rows that have a target. See losses.Loss."""
        from powertrain.models.kernels.losses import chunked_loss, trained_places

        return chunked_loss(model, hidden, targets, self.rows, trained_places(targets, trained), terms)

    def scores(self, model: Model, hidden: Tensor, targets: Tensor, trained: int) -> Tensor:
        """Return the log-probabilities of the targets. See losses.Scores."""
        from powertrain.models.kernels.losses import chunked_scores, trained_places

        return chunked_scores(model, hidden, targets, self.rows, trained_places(targets, trained))

    def loss_of_all(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None,
                    terms: Terms | None = None) -> Tensor:
        """Return the same loss with every row sent to the head, so that no shape depends on the targets."""
        from powertrain.models.kernels.losses import chunked_loss

        return chunked_loss(model, hidden, targets, self.rows, None, terms)
