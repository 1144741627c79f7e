"""The models of the source documents, as shapes: what can be counted of them needs no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.claims.probes.probe import one_of
from powertrain.facts.model import model_facts
from powertrain.models.config import make_config
from powertrain.records import ModelFacts

SHAPES: Mapping[str, Mapping[str, Any]] = {  # from the config.json that each is published with
    "llama-3.1-8b": {"vocabulary": 128256, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336,
                     "context": 131072, "tied_head": False},
    "phi-3-mini": {"vocabulary": 32064, "layers": 32, "width": 3072, "heads": 32, "kv_heads": 32, "mlp_width": 8192,
                   "context": 4096, "tied_head": False},
    "tinyllama-1.1b": {"vocabulary": 32000, "layers": 22, "width": 2048, "heads": 32, "kv_heads": 4, "mlp_width": 5632,
                       "context": 2048, "tied_head": False},
}


def known_facts(name: str) -> ModelFacts:
    """Raises WrongUse for a model that is none of SHAPES. All three are Llamas in shape."""
    config, _ = make_config("llama", **SHAPES[one_of("model", name, tuple(SHAPES))])
    return model_facts(config)
