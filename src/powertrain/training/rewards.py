"""The objective of a reward model: a head that scores a whole answer learns which of two is better.

With r_c and r_r the scores of the chosen and the rejected document at their last token, and m the margin of the row (0 where
there is none), the loss of a pair is -log sigmoid(r_c - r_r - m) + c (r_c + r_r)^2. Names and formula are TRL's (1.16).
Sources: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155 (rewards); Touvron et al. 2023, arXiv:2307.09288 (margin);
Eisenstein et al. 2023, arXiv:2312.09244 (c, which keeps rewards near 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from powertrain.data.example import Compared, Example
from powertrain.recipe.tables import Setting
from powertrain.records import Batch, ModelFacts
from powertrain.training.comparing import REWARDS, Comparing, Totals, comparison_of, with_shared_prompts
from powertrain.training.objective import Kernels, Sums

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.kernels.losses import Loss
    from powertrain.models.model import Model


@dataclass(frozen=True)
class Reward(Comparing):
    """The chosen answer of a pair gets the larger score."""

    center_rewards_coefficient: float = 0.0  # c: what rewards far from 0 cost; its paper has 0.01

    name = "reward"
    rows = "comparison"
    task = "reward"
    uses_loss = False
    settings: ClassVar[Mapping[str, Setting]] = {"center_rewards_coefficient": Setting(0.0, 0)}

    @property
    def metrics(self) -> tuple[str, ...]:
        return REWARDS[:4]

    def why_not(self, model: ModelFacts) -> str | None:
        return None if model.task == self.task else f"it trains a head that scores texts, and this is a {model.task} model"

    def told(self, batch: Batch, examples: Sequence[Example], totals: Totals) -> Batch:
        import torch

        batch = super().told(batch, examples, totals)
        margins = torch.tensor([example.margin for example in examples if isinstance(example, Compared)])
        return replace(batch, comparison=replace(comparison_of(batch), margins=margins))

    def sums(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        from torch.nn.functional import logsigmoid

        margins = comparison_of(batch).margins
        assert margins is not None
        chosen, rejected = rewards_of(model, batch, kernels).view(-1, 2).unbind(1)           # (pairs,) each
        apart = chosen - rejected
        losses = -logsigmoid(apart - margins) + self.center_rewards_coefficient * (chosen + rejected).square()
        apart = apart.detach()
        return {"loss": losses.sum(), **dict(zip(self.metrics, (
            chosen.detach().sum(), rejected.detach().sum(), apart.sum(), (apart > 0).float().sum()), strict=True))}


def rewards_of(model: Model, batch: Batch, kernels: Kernels) -> Tensor:
    """Return the score (D,) fp32 of each document at its last token. The head is computed in fp32: it is one row."""
    import torch

    from powertrain.models.kernels.losses import trained_places

    hidden = model.hidden(batch, **with_shared_prompts(kernels, batch))
    last = hidden.index_select(0, trained_places(batch.targets, batch.trained_tokens))
    with torch.autocast(hidden.device.type, enabled=False):
        return model.logits(last.float()).squeeze(1)
