"""Small batches and models that the tests of this room share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import Batch

VOCABULARY = 61


def make_batch(lengths: tuple[int, ...], seed: int = 0) -> Batch:
    """Random documents of these lengths, laid end to end."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=draws)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(tokens, tokens.roll(-1), positions, lengths, sum(lengths))


def make_model(family: str, seed: int = 0, **asked: Any) -> Decoder:
    """A tiny decoder with every weight away from its initial value, norms and biases too."""
    sizes = {"vocabulary": VOCABULARY, "layers": 2, "width": 48, "heads": 6, "context": 128}
    if family == "gpt_neox":
        sizes["heads"] = 2                   # of 24, of which 6 rotate; not 3: q, k and v are 3 as well
    torch.manual_seed(seed)
    model = Decoder(make_config(family, **(sizes | asked))[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.fixture
def flat_batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def tiny_model() -> Callable[..., Decoder]:
    return make_model
