"""What the trainer asks of a model, whoever computes it: our decoder, or another library behind the bridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from powertrain.models.kernels.attention import Attention, math_attention
from powertrain.records import Batch

if TYPE_CHECKING:
    from powertrain.models.decoder import RunBlock


class SavedTokenizer(Protocol):
    """A tokenizer that writes its own files."""

    def save(self, folder: Path) -> Any: ...


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode, and afterwards back in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Model(nn.Module):
    """A batch in, rows out, and scores for rows. See records.Batch for what the R rows are."""

    def hidden(self, batch: Batch, *, attention: Attention = math_attention,
               run_block: RunBlock | None = None) -> Tensor:
        """(R, width): what the head reads. A model behind the bridge ignores the kernels and gives its scores."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, width) -> (R, classes)."""
        raise NotImplementedError

    def penalty(self) -> Tensor | None:
        """() what is added to the loss of each optimizer step, besides the data's: regularised adapters have one."""
        return None

    def diagnose(self) -> Mapping[str, Mapping[str, float]]:
        """What its adapters have to say of themselves, by module name: adapters that are not matrices have something."""
        return {}

    def save(self, folder: Path, tokenizer: SavedTokenizer | None = None) -> None:
        """A folder that others load: the whole model, or the adapters of one that has them. Raises OSError."""
        raise NotImplementedError
