"""A model that another library computes, taken for our decoder of the same shape: what arithmetic can say of it."""

from __future__ import annotations

from dataclasses import replace

from powertrain.records import ModelFacts
from powertrain.shapes import linear_shapes


def as_decoder(model: ModelFacts) -> ModelFacts:
    """The facts with the weights that our decoder would have, by its names; our own models as they are.

    Adapters count as lying on all linears of their blocks, with the rank that gives them about as many weights as they have.
    """
    if model.provider == "native":
        return model
    heads = model.heads or 1
    head_width = model.head_width or max(1, model.width // heads)
    found = replace(model, heads=heads, kv_heads=model.kv_heads or heads, head_width=head_width,
                    mlp_width=model.mlp_width or 4 * model.width, rotary_width=head_width)
    linears = linear_shapes(found)
    shapes = {"embedding.weight": (model.vocabulary, model.width), "norm.weight": (model.width,),
              "blocks.0.attention_norm.weight": (model.width,), "blocks.0.mlp_norm.weight": (model.width,),
              **{f"blocks.0.{name}.weight": shape for name, shape in linears.items()}}
    if not model.tied_head:
        shapes["head.weight"] = (model.vocabulary, model.width)
    return replace(found, shapes={**shapes, **_adapter_shapes(found, linears)})


def _adapter_shapes(model: ModelFacts, linears: dict[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    if not model.adapter_parameters or not model.adapted_layers:
        return {}
    of_rank_1 = len(model.adapted_layers) * sum(outputs + inputs for outputs, inputs in linears.values())
    rank = max(1, round(model.adapter_parameters / of_rank_1))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs) in linears.items():
        shapes |= {f"blocks.0.{name}.adapters.all.A": (rank, inputs), f"blocks.0.{name}.adapters.all.B": (outputs, rank)}
    return shapes
