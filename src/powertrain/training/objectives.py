"""The objectives that a recipe may name, as a table, and the first of them: next-token prediction. It loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.recipe.tables import Setting, Table
from powertrain.records import Batch, ModelFacts, WrongUse
from powertrain.training.objective import Kernels, Objective, Sums
from powertrain.training.preferences import Dpo, Kto, Orpo, Simpo
from powertrain.training.rewards import Reward

if TYPE_CHECKING:
    from torch import Tensor, nn

    from powertrain.models.kernels.losses import Loss
    from powertrain.models.model import Model
    from powertrain.recipe import Recipe


@dataclass(frozen=True)
class NextToken(Objective):
    """Each token says the next one: mean cross-entropy over the trained tokens. Its settings are off by default."""

    label_smoothing: float = 0.0             # share of the target that is spread evenly over all classes
    z_loss: float = 0.0                      # weight of the squared logarithm of the softmax's normaliser; PaLM has 1e-4
    embedding_noise: float = 0.0             # NEFTune's alpha; Jain et al. 2023, arXiv:2310.05914, has 5

    name = "next_token"
    settings: ClassVar[Mapping[str, Setting]] = {
        "label_smoothing": Setting(0.0, 0, 1), "z_loss": Setting(0.0, 0), "embedding_noise": Setting(0.0, 0)}

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("cross_entropy", "z_loss") if self.z_loss else ("cross_entropy",) if self.label_smoothing else ()

    @property
    def has_terms(self) -> bool:
        return bool(self.label_smoothing or self.z_loss)

    @property
    def is_random(self) -> bool:
        return self.embedding_noise > 0

    def why_not(self, model: ModelFacts) -> str | None:
        if self.label_smoothing and model.task == "span":
            return "label smoothing spreads a target over all classes, and a span's classes are the places of its own document"
        return None

    def sums(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        from powertrain.models.kernels.losses import Terms

        noise = embedding_noise(model, batch, self.embedding_noise) if self.embedding_noise and model.training \
            else contextlib.nullcontext()
        with noise:
            hidden = model.hidden(batch, **kernels)
        if not self.metrics:
            return {"loss": loss(model, hidden, batch.targets, batch.trained_tokens)}
        terms = Terms(self.label_smoothing, self.z_loss)
        total, plain, squared = loss(model, hidden, batch.targets, batch.trained_tokens, terms).unbind()
        found = {"loss": total, "cross_entropy": plain, "z_loss": self.z_loss * squared}
        return {name: found[name] for name in ("loss", *self.metrics)}

    def held_out(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        """Return plain cross-entropy, which runs with any settings can be compared by."""
        return {"loss": loss(model, model.hidden(batch, **kernels), batch.targets, batch.trained_tokens)}


@contextlib.contextmanager
def embedding_noise(model: Model, batch: Batch, alpha: float) -> Iterator[None]:
    """Add uniform noise, inside, to what the embedding gives: at most alpha / sqrt(L d) for documents of L tokens.

    L counts padding where documents are padded, and d is the embedding's width. Source: Jain et al. 2023, arXiv:2310.05914.
    Raises WrongUse if the model does not use its embedding: noise that is asked for and not in force would go unseen.
    """
    import torch

    from powertrain.models.model import sent

    calls: list[nn.Module] = []

    def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        calls.append(module)
        width = output.shape[-1]
        if output.dim() == 2:                # documents end to end: (T, width)
            each = torch.tensor(batch.lengths, dtype=output.dtype).repeat_interleave(torch.tensor(batch.lengths))
            largest = sent((alpha / (each * width).sqrt())[:, None], output.device)
        else:                                # a library's own layout: (documents, L, width)
            largest = torch.tensor(alpha / (output.shape[-2] * width) ** 0.5, dtype=output.dtype)
        return output + torch.empty_like(output).uniform_(-1, 1) * largest

    handles = [embedding.register_forward_hook(add) for embedding in model.input_embeddings]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        off = "objective.embedding_noise=0"
        raise WrongUse(f"the model does not call its input embedding, so noise cannot be added to it; use {off}", cure=(off,))


NEXT_TOKEN = NextToken()
OBJECTIVES = Table("objective", {kind.name: kind for kind in (NextToken, Dpo, Orpo, Simpo, Kto, Reward)})


def objective_of(recipe: Recipe) -> Objective:
    """Return the objective that the recipe names. Raises WrongUse for an unknown name or setting."""
    kind: type[Objective] = OBJECTIVES.named(recipe.objective.name)
    found: Objective = kind(**OBJECTIVES.settings(kind.name, recipe.objective.settings))
    return found
