"""Tiny decoders that look trained, plain and with adapters, for the tests of what is done with a trained model."""

from __future__ import annotations

from typing import Any

import torch

from powertrain.models.adapters.attached import adapters_of, add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder

ROWS = 320                                   # of the embedding: a few more than the tests' tokenizers have tokens


def make_base(family: str, **asked: Any) -> Decoder:
    """A tiny decoder with every weight away from its initial value."""
    heads = 2 if family == "gpt_neox" else 4
    sizes = {"vocabulary": ROWS, "layers": 2, "width": 64, "heads": heads, "context": 64, "end_of_text": 0}
    torch.manual_seed(0)
    model = Decoder(make_config(family, **(sizes | asked))[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.eval()


def with_adapter(model: Decoder, *, strength: float = 0.1, **asked: Any) -> Decoder:
    """The model with an adapter that has learned something."""
    add_adapters(model, AdapterConfig(**({"r": 4, "alpha": 8.0} | asked)))
    with torch.no_grad():
        for _, adapter in adapters_of(model):
            for parameter in adapter.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn_like(parameter) * strength)
    return model.eval()


def disturb(model: torch.nn.Module, seed: int = 1) -> None:
    """Moves every adapter away from its start."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.05)


def adapted(model: Decoder, config: AdapterConfig) -> Decoder:
    """The model with adapters that do something."""
    add_adapters(model, config)
    disturb(model)
    return model
