"""What the trainer asks of a model, whoever computes it: our decoder, or another library behind the bridge."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from powertrain.models.kernels.attention import Attention, math_attention
from powertrain.records import Batch

Rotary = tuple[Tensor, Tensor]        # cosines and sines, each (T, 1, rotary width) fp32


class RunBlock(Protocol):
    """Runs a `decoder.Block`: plainly, compiled, or with its activations computed twice."""

    def __call__(self, block: Any, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor: ...


class SavedTokenizer(Protocol):
    """A tokenizer that writes its own files."""

    def save(self, folder: Path) -> Any: ...


def sent(temporary: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host that nobody keeps, on `device`, without a wait where that is safe.

    CUDA has read it when the call returns. MPS may read it later, when other numbers are there (pytorch#189690).
    """
    return temporary.to(device, non_blocking=device.type == "cuda")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and afterwards back in the mode it was in."""
    if not model.training:                   # to tell every module so takes as long as a token of a small model
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


class Model(nn.Module):
    """A batch in, rows out, and scores for rows. See records.Batch for what the R rows are."""

    def hidden(self, batch: Batch, *, attention: Attention = math_attention,
               run_block: RunBlock | None = None) -> Tensor:
        """Return the head's input (R, width). A model behind the bridge ignores the kernels and returns its scores."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores (R, classes) of `hidden` (R, width)."""
        raise NotImplementedError

    @property
    def input_embeddings(self) -> Sequence[nn.Module]:
        """Return the modules that turn token ids into vectors: an encoder-decoder may have two."""
        raise NotImplementedError
