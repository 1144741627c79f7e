"""Objectives that learn which answer is better: DPO, ORPO, SimPO from pairs, and KTO from rated answers.

Names, settings and formulas are TRL's (1.16), whose losses and gradients they give for the same batch. Where TRL divides by the
tokens or pairs of a micro-batch, these divide by those of the whole optimizer step, so every split gives the same update.

With x the prompt, y the answers, c and r for chosen and rejected, pi the model, ref the reference:

    h = log pi(y|x) - log ref(y|x)           the implicit reward is beta h; margins are beta (h_c - h_r)

Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290; hinge, Zhao et al. 2023, arXiv:2305.10425; IPO, Azar et al. 2023,
arXiv:2310.12036, over the mean of an answer's tokens as its authors do; robust, Chowdhury et al. 2024, arXiv:2403.00409; EXO,
Ji et al. 2024, arXiv:2402.00856; NCA, Chen et al. 2024, arXiv:2402.05369; BCO, Jung et al. 2024, arXiv:2404.04656; SPPO, Wu et
al. 2024, arXiv:2405.00675; APO, D'Oosterlinck et al. 2024, arXiv:2408.06266; DiscoPOP, Lu et al. 2024, arXiv:2406.08414; label
smoothing of the sigmoid loss, Mitchell 2023 (cDPO); rpo_alpha, Pang et al. 2024, arXiv:2404.19733; ORPO, Hong et al. 2024,
arXiv:2403.07691; SimPO, Meng et al. 2024, arXiv:2405.14734; KTO, Ethayarajh et al. 2024, arXiv:2402.01306.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from powertrain.data.example import Compared, Example
from powertrain.recipe.tables import Setting
from powertrain.records import Batch, WrongUse
from powertrain.training.comparing import (
    REWARDS,
    Comparing,
    StartingWeights,
    Totals,
    chosen_nll,
    comparison_of,
    other_documents,
    reward_sums,
    target_scores,
)
from powertrain.training.objective import Kernels, Sums

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.kernels.losses import Loss
    from powertrain.models.model import Model
    from powertrain.training.ranks import Ranks

SMOOTHED = ("sigmoid", "robust", "exo_pair")  # losses of DPO that read label_smoothing
LEAST_BETA = 1e-6


@dataclass(frozen=True)
class Dpo(Comparing):
    """Direct preference optimisation: the chosen answer gains on the rejected one, as seen from the reference."""

    beta: float = 0.1                        # how far from the reference: larger is nearer; of ipo, tau
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0             # the share of pairs that are taken to be the wrong way round
    rpo_alpha: float = 0.0                   # weight of the chosen answers' mean negative log-likelihood
    discopop_tau: float = 0.05

    name = "dpo"
    has_reference = True
    settings: ClassVar[Mapping[str, Setting]] = {
        "beta": Setting(0.1, LEAST_BETA), "loss_type": Setting("sigmoid", choices=(
            "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
            "discopop", "sigmoid_norm")),
        "label_smoothing": Setting(0.0, 0, 0.5), "rpo_alpha": Setting(0.0, 0), "discopop_tau": Setting(0.05, LEAST_BETA)}

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise WrongUse(f"objective.label_smoothing={self.label_smoothing:g} has no place in the {self.loss_type} loss; "
                           f"leave it out, or use objective.loss_type={SMOOTHED[0]}", keys=("objective.label_smoothing",))

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*REWARDS, "nll_loss") if self.rpo_alpha else REWARDS

    def of_scores(self, batch: Batch, targets: Tensor, answers: Tensor, reference: Tensor) -> Sums:
        ratios = answers - reference                             # (2 pairs,): h of each answer
        chosen, rejected = ratios.view(-1, 2).unbind(1)
        lengths = comparison_of(batch).answer_tokens.clamp(min=1)
        loss = self._losses(chosen, rejected, *(ratios / lengths).view(-1, 2).unbind(1)).sum()
        found = reward_sums(self.beta * chosen.detach(), self.beta * rejected.detach(), answers)
        if not self.rpo_alpha:
            return {"loss": loss, **found}
        nll = chosen_nll(batch, targets)
        return {"loss": loss + self.rpo_alpha * nll, **found, "nll_loss": nll.detach()}

    def _losses(self, chosen: Tensor, rejected: Tensor, chosen_mean: Tensor, rejected_mean: Tensor) -> Tensor:
        """Return the loss of each pair (pairs,) from h of its answers, and from h over their tokens."""
        import math

        from torch.nn.functional import logsigmoid, relu

        beta, smoothing = self.beta, self.label_smoothing
        margin = beta * (chosen - rejected)
        match self.loss_type:
            case "sigmoid":
                return -logsigmoid(margin) * (1 - smoothing) - logsigmoid(-margin) * smoothing
            case "hinge":
                return relu(1 - margin)
            case "ipo":
                return (chosen_mean - rejected_mean - 1 / (2 * beta)).square()
            case "robust":
                return (-(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)) / (1 - 2 * smoothing)
            case "exo_pair":
                flipped = smoothing or 1e-3  # 0 has no logarithm; TRL's value
                return margin.sigmoid() * (logsigmoid(margin) - math.log1p(-flipped)) + \
                    (-margin).sigmoid() * (logsigmoid(-margin) - math.log(flipped))
            case "nca_pair":
                good, bad = beta * chosen, beta * rejected
                return -logsigmoid(good) - 0.5 * logsigmoid(-good) - 0.5 * logsigmoid(-bad)
            case "bco_pair":
                return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
            case "sppo_hard":
                return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
            case "apo_zero":
                return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
            case "apo_down":
                return (beta * chosen).sigmoid() + 1 - margin.sigmoid()
            case "discopop":
                mixed = (margin / self.discopop_tau).sigmoid()
                return -logsigmoid(margin) * (1 - mixed) + (-margin).exp() * mixed
            case _:                          # sigmoid_norm
                return -logsigmoid(beta * (chosen_mean - rejected_mean))


@dataclass(frozen=True)
class Orpo(Comparing):
    """Odds ratio preference optimisation: next-token prediction on the chosen answer, and an odds ratio; no reference."""

    beta: float = 0.1                        # weight of the odds ratio: lambda in the paper

    name = "orpo"
    trains_prompts = True
    settings: ClassVar[Mapping[str, Setting]] = {"beta": Setting(0.1, LEAST_BETA)}

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*REWARDS, "nll_loss", "log_odds_ratio", "log_odds_chosen")

    def of_scores(self, batch: Batch, targets: Tensor, answers: Tensor, reference: Tensor) -> Sums:
        import torch
        from torch.nn.functional import logsigmoid

        means = answers / comparison_of(batch).answer_tokens.clamp(min=1)
        chosen, rejected = means.view(-1, 2).unbind(1)
        log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
        ratio, nll = logsigmoid(log_odds), chosen_nll(batch, targets)
        good, bad = self.beta * chosen.detach(), self.beta * rejected.detach()
        return {"loss": nll - self.beta * ratio.sum(), **reward_sums(good, bad, torch.stack((chosen, rejected), 1).flatten()),
                "nll_loss": nll.detach(), "log_odds_ratio": ratio.detach().sum(), "log_odds_chosen": log_odds.detach().sum()}


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of negative x without losing its digits near 0: Mächler 2012, log1mexp."""
    import torch

    x = x.clamp(max=-1e-7)                   # an answer of probability 1 has no odds
    near = x > -0.693                        # log 2
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(x)))


@dataclass(frozen=True)
class Simpo(Comparing):
    """Simple preference optimisation: the mean log-probability of an answer is its reward, with a margin; no reference."""

    beta: float = 0.1                        # the paper has 2 to 10, TRL 0.1
    simpo_gamma: float = 0.5                 # the margin that the chosen answer must win by
    label_smoothing: float = 0.0
    cpo_alpha: float = 0.0                   # weight of the chosen answers' mean negative log-likelihood (CPO-SimPO)

    name = "simpo"
    settings: ClassVar[Mapping[str, Setting]] = {
        "beta": Setting(0.1, LEAST_BETA), "simpo_gamma": Setting(0.5, 0), "label_smoothing": Setting(0.0, 0, 0.5),
        "cpo_alpha": Setting(0.0, 0)}

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*REWARDS, "nll_loss") if self.cpo_alpha else REWARDS

    def of_scores(self, batch: Batch, targets: Tensor, answers: Tensor, reference: Tensor) -> Sums:
        from torch.nn.functional import logsigmoid

        means = answers / comparison_of(batch).answer_tokens.clamp(min=1)
        chosen, rejected = means.view(-1, 2).unbind(1)
        margin = self.beta * (chosen - rejected) - self.simpo_gamma
        losses = -logsigmoid(margin) * (1 - self.label_smoothing) - logsigmoid(-margin) * self.label_smoothing
        found = reward_sums(self.beta * chosen.detach(), self.beta * rejected.detach(), means)
        if not self.cpo_alpha:
            return {"loss": losses.sum(), **found}
        nll = chosen_nll(batch, targets)
        return {"loss": losses.sum() + self.cpo_alpha * nll, **found, "nll_loss": nll.detach()}


# ------------------------------------------------------------------------------------------------ rated answers


@dataclass(frozen=True)
class Kto(Comparing):
    """Kahneman-Tversky optimisation: an answer that is rated by itself gains or loses on the reference, beyond a KL divergence.

    That divergence is estimated over the whole step, before its passes, from prompts with answers of other prompts.
    """

    beta: float = 0.1
    loss_type: str = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    name = "kto"
    rows = "rating"
    has_reference = True
    settings: ClassVar[Mapping[str, Setting]] = {
        "beta": Setting(0.1, LEAST_BETA), "loss_type": Setting("kto", choices=("kto", "apo_zero_unpaired")),
        "desirable_weight": Setting(1.0, 0), "undesirable_weight": Setting(1.0, 0)}

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*REWARDS, "kl")

    def documents(self, example: Example) -> Sequence[Example]:
        assert isinstance(example, Compared)
        return example.documents[:1]

    def _answers(self, example: Compared) -> list[np.ndarray[Any, Any]]:
        from powertrain.records import IGNORE

        return [example.documents[0].targets != IGNORE]

    def told(self, batch: Batch, examples: Sequence[Example], totals: Totals) -> Batch:
        import torch

        batch = super().told(batch, examples, totals)
        compared = [example for example in examples if isinstance(example, Compared)]
        others, known = other_documents(compared), [example.reference for example in compared if example.reference is not None]
        return replace(batch, comparison=replace(
            comparison_of(batch), desirable=torch.tensor([example.desirable for example in compared]),
            good_weight=totals.examples / totals.desirable if totals.desirable else 0.0,
            bad_weight=totals.examples / (totals.examples - totals.desirable) if totals.examples > totals.desirable else 0.0,
            others=others, others_reference=torch.tensor([of_other for _, of_other in known])
            if len(known) == len(compared) else None))

    def scores_by(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Tensor:
        import torch

        others = comparison_of(batch).others
        assert others is not None
        return torch.stack([target_scores(model, one, kernels, loss)[1] for one in (batch, others)], 1)

    def settle(self, model: Model, batches: list[Batch], kernels: Kernels, loss: Loss, ranks: Ranks,
               spare: Callable[[], Batch]) -> list[Batch]:
        """Return the batches of a step with the estimate of the KL divergence over all of them, in all processes."""
        import torch

        from powertrain.models.model import evaluating

        if self.loss_type != "kto":
            return batches
        known = torch.zeros(2, device=next(model.parameters()).device)           # sum of the divergences, and their number
        with torch.no_grad(), evaluating(model):
            for batch, counts in ranks.abreast(batches, spare):
                found = self._divergences(model, batch, kernels, loss)
                if counts:
                    known += torch.stack((found.sum(), found.new_tensor(len(found))))
        ranks.sum([known])
        kl = (known[0] / known[1]).clamp(min=0)
        return [replace(batch, comparison=replace(batch.comparison, kl=kl)) for batch in batches
                if batch.comparison is not None]

    def _divergences(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Tensor:
        """Return log pi - log ref of each prompt with an answer of another prompt (D,)."""
        import torch

        others, reference = comparison_of(batch).others, comparison_of(batch).others_reference
        assert others is not None
        if reference is None and isinstance(self.reference, StartingWeights):
            with torch.no_grad(), self.reference.in_place(model):
                reference = target_scores(model, others, kernels, loss)[1]
        scores = target_scores(model, others, kernels, loss)[1]
        return scores - (scores if reference is None else reference)

    def of_scores(self, batch: Batch, targets: Tensor, answers: Tensor, reference: Tensor) -> Sums:
        import torch

        comparison = comparison_of(batch)
        assert comparison.desirable is not None
        ratios, good = answers - reference, comparison.desirable
        kl = ratios.new_zeros(()) if comparison.kl is None else comparison.kl
        sign = torch.where(good, 1.0, -1.0)
        losses = 1 - (self.beta * sign * (ratios - kl)).sigmoid()
        weights = torch.where(good, self.desirable_weight, self.undesirable_weight)
        rewards, scored = self.beta * ratios.detach(), answers.detach()
        goods, bads = good * comparison.good_weight, ~good * comparison.bad_weight
        found: dict[str, Callable[[], Tensor]] = {
            "rewards_chosen": lambda: rewards * goods, "rewards_rejected": lambda: rewards * bads,
            "rewards_margins": lambda: rewards * (goods - bads),
            "rewards_accuracies": lambda: (sign * (ratios.detach() - kl) > 0).float(),
            "logps_chosen": lambda: scored * goods, "logps_rejected": lambda: scored * bads, "kl": lambda: kl.expand_as(scored)}
        return {"loss": (weights * losses).sum(), **{name: value().sum() for name, value in found.items()}}
