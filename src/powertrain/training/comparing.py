"""What the objectives that compare answers share: scores of whole answers, a batch's comparison, and the frozen reference.

A pair's two documents lie side by side in one pass and see nothing of each other. The log-probability of an answer is the sum
over its tokens, the one that ends the turn included; prompts are read and not scored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from powertrain.data.example import Compared, Example, collate
from powertrain.records import IGNORE, Batch, Comparison, ModelFacts, SharedPrompts
from powertrain.training.objective import Kernels, Objective, Sums

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from powertrain.models.kernels.attention import Attention
    from powertrain.models.kernels.losses import Loss
    from powertrain.models.model import Model

REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies", "logps_chosen", "logps_rejected")


@dataclass(frozen=True)
class Totals:
    """What a step's loss is divided by, counted over all of its examples, in whichever process and pass they are."""

    examples: int
    nll_targets: int                         # of the chosen documents
    desirable: int


@dataclass(frozen=True)
class Comparing(Objective):
    """An objective over pairs of answers. A subclass says what becomes of the two log-probabilities of each pair."""

    reference: StoredReference | StartingWeights | None = None       # None: the model as it is, as before the first step
    shares_prompts: bool = False             # the prompt of a pair is computed once

    rows = "preference"
    has_reference: ClassVar[bool] = False
    trains_prompts: ClassVar[bool] = False   # the loss has a term over the whole chosen document

    def why_not(self, model: ModelFacts) -> str | None:
        return None if model.task == "causal" else f"it trains decoders, and this is a {model.task} model"

    def for_model(self, model: Model) -> Objective:
        if self.has_reference and self.reference is None:
            return replace(self, reference=StartingWeights.of(model))
        return self

    @property
    def held(self) -> Iterable[Tensor]:
        return self.reference.copies.values() if isinstance(self.reference, StartingWeights) else ()

    def documents(self, example: Example) -> Sequence[Example]:
        assert isinstance(example, Compared)
        chosen, rejected = example.documents
        if self.trains_prompts:
            chosen = replace(chosen, targets=np.append(chosen.inputs[1:], chosen.targets[-1]))
        if self.shares_prompts:
            rejected = replace(rejected, inputs=rejected.inputs[example.shared:], targets=rejected.targets[example.shared:])
        return chosen, rejected

    def units(self, batch: Batch) -> int:
        return comparison_of(batch).examples

    def totals(self, examples: Sequence[Example]) -> Totals:
        first = [self.documents(example)[0].targets for example in examples]
        return Totals(len(examples), sum(int(np.count_nonzero(targets != IGNORE)) for targets in first),
                      sum(example.desirable for example in examples if isinstance(example, Compared)))

    def told(self, batch: Batch, examples: Sequence[Example], totals: Totals) -> Batch:
        import torch

        compared = [example for example in examples if isinstance(example, Compared)]
        laid = [document for example in compared for document in self.documents(example)]
        found = replace(_comparison(laid, [self._answers(example) for example in compared]), examples=len(compared),
                        nll_weight=totals.examples / max(1, totals.nll_targets),
                        reference=_references(compared, range(len(laid) // max(1, len(compared)))))
        if not (self.shares_prompts and any(example.shared for example in compared)):
            return replace(batch, comparison=found)
        longest = max(len(document.inputs) for example in compared for document in example.documents)
        shared, positions = _share(batch.lengths, [example.shared for example in compared], longest)
        return replace(batch, positions=torch.from_numpy(positions), comparison=replace(found, shared=shared))

    def _answers(self, example: Compared) -> list[np.ndarray[Any, Any]]:
        """Return of each laid document, for each token, whether its target belongs to an answer."""
        chosen, rejected = (document.targets != IGNORE for document in example.documents)
        return [chosen, rejected[example.shared if self.shares_prompts else 0:]]

    # ------------------------------------------------------------------------------------------- scores

    def sums(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        reference = self.reference_scores(model, batch, kernels, loss) if self.has_reference else None
        targets, answers = target_scores(model, batch, kernels, loss)
        return self.of_scores(batch, targets, answers, answers.detach() if reference is None else reference)

    def reference_scores(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Tensor | None:
        """Return the reference's log-probability of each answer (D,), or None where the model itself is still the reference."""
        import torch

        known = comparison_of(batch).reference
        if known is not None or not isinstance(self.reference, StartingWeights):
            assert known is not None or not getattr(self.reference, "is_ready", False), "the examples have no reference scores"
            return known
        with torch.no_grad(), self.reference.in_place(model):
            return target_scores(model, batch, kernels, loss)[1]

    def scores_by(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Tensor:
        """Return the log-probabilities (examples, 2) that the model gives the two documents of each example: what is stored."""
        return target_scores(model, batch, kernels, loss)[1].view(-1, 2)

    def of_scores(self, batch: Batch, targets: Tensor, answers: Tensor, reference: Tensor) -> Sums:
        """Return loss and metrics from the log-probabilities of targets (N,) and answers (D,) and the reference's (D,)."""
        raise NotImplementedError

    @property
    def held_out_metrics(self) -> tuple[str, ...]:
        return self.metrics

    def held_out(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        return self.sums(model, batch, kernels, loss)


def comparison_of(batch: Batch) -> Comparison:
    """Return what an objective that compares answers has told a batch; see `Objective.told`."""
    assert batch.comparison is not None
    return batch.comparison


def with_shared_prompts(kernels: Kernels, batch: Batch) -> Kernels:
    """Return the kernels for a batch in which prompts may stand once for two answers."""
    if batch.comparison is None or batch.comparison.shared is None:
        return kernels
    return {**kernels, "attention": OverSharedPrompts(kernels["attention"], batch.comparison.shared)}


def target_scores(model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target (N,), and their sum over each document's answer (D,), both fp32."""
    from powertrain.models.kernels.losses import scores_of

    comparison = comparison_of(batch)
    hidden = model.hidden(batch, **with_shared_prompts(kernels, batch))
    targets = scores_of(loss)(model, hidden, batch.targets, batch.trained_tokens)
    answers = targets.new_zeros(len(comparison.answer_tokens)).index_add(0, comparison.document, targets * comparison.is_answer)
    return targets, answers


def chosen_nll(batch: Batch, targets: Tensor) -> Tensor:
    """Return the summed negative log-likelihood of the chosen documents' targets, (), times the step's weight of it."""
    comparison = comparison_of(batch)
    return -(targets * (comparison.document % 2 == 0)).sum() * comparison.nll_weight


def reward_sums(chosen: Tensor, rejected: Tensor, answers: Tensor) -> Sums:
    """Return the metrics of pairs, summed: their rewards (pairs,), and the log-probabilities of the answers (2 pairs,)."""
    first, second = answers.detach().view(-1, 2).unbind(1)
    return {name: value.sum() for name, value in zip(REWARDS, (
        chosen, rejected, chosen - rejected, (chosen > rejected).float(), first, second), strict=True)}


# ------------------------------------------------------------------------------------------------ what a batch is told


def _comparison(documents: Sequence[Example], answers: Sequence[Sequence[np.ndarray[Any, Any]]]) -> Comparison:
    """Return the comparison of documents as they are laid; `answers` says of each example's, token by token, what is scored."""
    import torch

    trained = [document.targets != IGNORE for document in documents]
    scored = [part for parts in answers for part in parts]
    kept = [part[where] for part, where in zip(scored, trained, strict=True)]
    return Comparison(
        0, document=torch.from_numpy(np.repeat(np.arange(len(documents)), [len(part) for part in kept])),
        is_answer=torch.from_numpy(np.concatenate(kept)),
        answer_tokens=torch.tensor([float(part.sum()) for part in kept]), nll_weight=0.0)


def _references(examples: Sequence[Compared], which: Sequence[int]) -> Tensor | None:
    """Return the stored scores of the examples' documents `which`, one example after the other; None where there are none."""
    import torch

    known = [example.reference for example in examples if example.reference is not None]
    if len(known) < len(examples):
        return None
    return torch.tensor([scores[place] for scores in known for place in which], dtype=torch.float32)


def _share(lengths: Sequence[int], shared: Sequence[int], longest: int) -> tuple[SharedPrompts, np.ndarray[Any, Any]]:
    """Return how attention sees pairs whose second document lacks its first `shared` tokens, and the positions (T,).

    Padding gets no position beyond those of the `longest` whole document.
    """
    import torch

    spread, kept, whole, positions = [], [], [], []
    first = beyond = 0                       # places in the batch, and among the tokens that attention sees
    for number, length in enumerate(lengths):
        cut = shared[number // 2] if number % 2 and number // 2 < len(shared) else 0
        if cut:
            spread.append(np.arange(first - lengths[number - 1], first - lengths[number - 1] + cut))
        spread.append(np.arange(first, first + length))
        kept.append(np.arange(beyond + cut, beyond + cut + length))
        positions.append(np.arange(cut, cut + length))
        whole.append(cut + length)
        first, beyond = first + length, beyond + cut + length
    return SharedPrompts(torch.from_numpy(np.concatenate(spread)), torch.from_numpy(np.concatenate(kept)),
                         tuple(whole)), np.minimum(np.concatenate(positions), longest - 1)


@dataclass(frozen=True)
class OverSharedPrompts:
    """Attention over whole documents, where the prompt of a pair stands once in the batch."""

    attention: Attention
    shared: SharedPrompts

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                 window: int | None, scale: float) -> Tensor:
        del lengths
        q, k, v = (x.index_select(0, self.shared.spread) for x in (q, k, v))
        out = self.attention(q, k, v, self.shared.lengths, layer=layer, dropout=dropout, window=window, scale=scale)
        return out.index_select(0, self.shared.kept)


# ------------------------------------------------------------------------------------------------ the reference


@dataclass(frozen=True)
class StoredReference:
    """The reference's scores come with the examples."""

    is_ready: bool = False                   # they are there; before the first step the model itself is the reference


@dataclass(frozen=True)
class StartingWeights:
    """The trained weights as they were at the beginning: with them in place the model is its own reference.

    New adapters begin as nothing, so with theirs in place the model is its base.
    """

    copies: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: Model) -> Self:
        return cls({name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad})

    @contextlib.contextmanager
    def in_place(self, model: Model) -> Iterator[None]:
        """Put them in the place of the trained ones, inside, without dropout. No gradient may be computed of what is inside."""
        import torch

        from powertrain.models.model import evaluating

        trained = {name: (weight, weight.data) for name, weight in model.named_parameters() if name in self.copies}
        torch.clear_autocast_cache()         # it knows a weight by its address alone
        try:
            for name, (weight, _) in trained.items():
                weight.data = self.copies[name]
            with evaluating(model):
                yield
        finally:
            for weight, own in trained.values():
                weight.data = own
            torch.clear_autocast_cache()


def other_documents(examples: Sequence[Compared]) -> Batch:
    """Return a batch of the examples' prompts with answers of other prompts, with its comparison."""
    documents = [example.documents[1] for example in examples]
    scored = [[document.targets != IGNORE] for document in documents]
    return replace(collate(documents), comparison=_comparison(documents, scored))
