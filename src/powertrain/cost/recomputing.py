"""What activation checkpointing computes again of a block: everything up to the last thing that a gradient needs.

Autograd's non-reentrant checkpoint stops as soon as the last tensor that was saved exists again. Without dropout behind
it that is the input of the down projection, whose product is never made again; with DoRA on it (and no dropout, which
gives DoRA a product of its own) it is needed for the gradient of the magnitudes. Where the frozen matrix is made wide for
each product, nothing of that is saved, and the last thing is what the adapter's B reads: B's product is left out too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from powertrain.cost.gradients import adapter_dropout, has_frozen_base, linears, lowest_layer
from powertrain.cost.stored import matrix_bytes
from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES

LAST = "mlp_out"


@dataclass(frozen=True)
class Recomputed:
    """One block that is computed again."""

    layer: int
    adapted: bool                            # it has adapters
    left_out: frozenset[str]                 # linears whose product is not made again
    leaves_out_up: bool                      # nor the last product of their adapters


def recomputed_of(model: ModelFacts, every: int, dtype: str) -> tuple[Recomputed, ...]:
    """The blocks that are computed again when every `every`-th one keeps only its input; 0: none."""
    if not every:
        return ()
    layers = (layer for layer in range(0, model.layers, every) if layer >= lowest_layer(model))
    return tuple(_of_layer(model, layer, dtype) for layer in layers)


def made_again_flops(model: ModelFacts, tokens: int, saved: Mapping[str, str], blocks: int) -> float:
    """FLOPs of what blocks written by hand do not keep (models/kernels/fused/saving.py) and make again: the products alone."""
    again = {"inner": "mlp_in", "heads": "qkv"}
    names = {again[kind] for kind, action in saved.items() if action == "recompute"}
    blocks = min(blocks, model.layers - lowest_layer(model))
    return 2.0 * blocks * tokens * sum(linear.weights for linear in linears(model) if linear.name in names)


def _of_layer(model: ModelFacts, layer: int, dtype: str) -> Recomputed:
    adapted = has_frozen_base(model) and layer in model.adapted_layers
    with_magnitude = adapted and any(f".{LAST}." in name and name.endswith(".magnitude") for name in model.shapes)
    needs_product = with_magnitude and not adapter_dropout(model)
    left_out = frozenset() if model.dropout or needs_product else frozenset({LAST})
    made_wide = has_frozen_base(model) and matrix_bytes(model) != DTYPE_BYTES[dtype]
    last_has_adapters = adapted and any(linear.name == LAST and linear.adapters for linear in linears(model))
    return Recomputed(layer, adapted, left_out,
                      leaves_out_up=bool(left_out) and made_wide and last_has_adapters and not with_magnitude)
