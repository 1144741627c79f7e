"""The weights of a model: which ones there are, how many bytes each takes as it is stored, and which of them have a gradient.

The backward pass goes everywhere in full training; with adapters on frozen weights no lower than the lowest adapter. A linear
that is trained saves its input, for the gradient of its weight or of its adapters. A frozen one saves nothing but its weight,
and passes the gradient on, if anything below wants it. Below the first adapter nothing does: those blocks, and the part of the
first adapted block before its first adapter, have no backward pass and save nothing.

Trained weights are stored in fp32, frozen ones in the type of their files, in 8 bits, or in 4.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Any

from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT, FOUR_BIT, FOUR_BIT_BYTES, FP32, linear_shapes, takes_eight_bits

ADAPTER = re.compile(r"blocks\.\d+\.(\w+)\.adapters\.(\w+)\.(\w+)")   # linear, module, weight


@dataclass(frozen=True)
class Adapter:
    """One adapter's A (rank, inputs) and B (outputs, rank)."""

    inputs: int
    rank: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Linear:
    """One linear of a block, projections of one input fused, and what its adapters are where the block has some."""

    name: str
    inputs: int
    outputs: int
    adapters: tuple[Adapter, ...] = ()

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Backward:
    """The gradients that one block's backward pass makes."""

    needed: frozenset[str]                   # linears with a gradient of their input
    trained: frozenset[str]                  # linears with a gradient of their weight, or of their adapters
    attention: bool                          # queries, keys and values have a gradient


def has_frozen_base(model: ModelFacts) -> bool:
    return model.adapter_parameters > 0


def adapter_dropout(model: ModelFacts) -> float:
    """The share of each adapter's input that is dropped."""
    return float(getattr(model, "adapter_dropout", 0.0))


def linears(model: ModelFacts) -> tuple[Linear, ...]:
    """Those of one block, in the order in which they are computed."""
    adapters = adapters_of(model)
    return tuple(Linear(name, inputs, outputs, tuple(adapters.get(name, ())))
                 for name, (outputs, inputs) in linear_shapes(model).items())


def adapters_of(model: ModelFacts) -> dict[str, list[Adapter]]:
    """Linear -> its adapters, in a block that has some, read off the shapes of A and B."""
    found: dict[str, list[Adapter]] = {}
    for name, shape in model.shapes.items():
        match = ADAPTER.fullmatch(name)
        if match and match.group(3) == "A":
            rank, inputs = shape
            outputs = model.shapes[f"{name.removesuffix('A')}B"][0]
            found.setdefault(match.group(1), []).append(Adapter(inputs, rank, outputs))
    return found


def adapter_tensors(model: ModelFacts) -> list[tuple[int, ...]]:
    """The shapes of all weights of the adapters of one block that has some."""
    return [shape for name, shape in model.shapes.items() if ADAPTER.fullmatch(name)]


def lowest_layer(model: ModelFacts) -> int:
    """The first block that has a backward pass."""
    return min(model.adapted_layers, default=0)


def backward_of(model: ModelFacts, layer: int) -> Backward:
    """Return the backward pass of block `layer`."""
    parts = linears(model)
    if not has_frozen_base(model):
        names = frozenset(linear.name for linear in parts)
        return Backward(names, names, attention=True)
    trained = frozenset(linear.name for linear in parts if layer in model.adapted_layers and linear.adapters)
    block = layer > lowest_layer(model)      # its input needs a gradient
    attention = block or "qkv" in trained
    read = block if model.parallel_residual else attention or "attention_out" in trained     # the input of the MLP's norm
    flows = {"qkv": block, "attention_out": attention, "mlp_in": read, "mlp_out": read or "mlp_in" in trained}
    return Backward(frozenset(name for name, needed in flows.items() if needed), trained, attention)


# ------------------------------------------------------------------------------------------------ stored bytes


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


# ------------------------------------------------------------------------------------------------ bytes


def matrix_bytes(model: ModelFacts) -> float:
    """Of one weight in the blocks' linears."""
    if not has_frozen_base(model):
        return FP32
    if model.frozen_dtype in EIGHT_BIT:
        parts = linears(model)
        return 1 + FP32 * sum(part.outputs for part in parts) / sum(part.weights for part in parts)
    return FOUR_BIT_BYTES if model.frozen_dtype in FOUR_BIT else DTYPE_BYTES[model.frozen_dtype]


def is_scaled(model: ModelFacts, name: str, device: str) -> bool:
    """Whether the linear of that name is held, and multiplied, in 8 bits; as kernels/scaled.py, but for measured outliers."""
    return model.frozen_dtype in EIGHT_BIT and _suits(model, name, model.frozen_dtype, device)


def _suits(model: ModelFacts, name: str, stored: str, device: str) -> bool:
    part = next(part for part in linears(model) if part.name == name)
    return takes_eight_bits(part.outputs, part.inputs, stored, device)


def left_wide_bytes(model: ModelFacts, device: str, dtype: str) -> int:
    """What `frozen_bytes` lacks for matrices whose sizes 8-bit products do not take: they are held in `dtype`."""
    if model.frozen_dtype not in EIGHT_BIT:
        return 0
    left = [part for part in linears(model) if not is_scaled(model, part.name, device)]
    return model.layers * sum((DTYPE_BYTES[dtype] - 1) * part.weights - FP32 * part.outputs for part in left)


def other_bytes(model: ModelFacts) -> float:
    """Of one weight in embeddings, norms and head, which stay as they are when the matrices are stored otherwise.

    Where it is not known as what, they count as fp32: an upper bound.
    """
    if not has_frozen_base(model):
        return FP32
    stored = str(getattr(model, "unquantised_dtype", ""))
    return DTYPE_BYTES.get(stored or model.frozen_dtype, FP32)


def as_held(model: ModelFacts, base_dtype: str | None) -> ModelFacts:
    """The facts with the frozen matrices of the blocks in another type than their files have; None: as these have them."""
    if base_dtype is None or not has_frozen_base(model):
        return model
    others: dict[str, Any] = {
        field.name: getattr(model, field.name) or model.frozen_dtype for field in dataclasses.fields(model)
        if field.name == "unquantised_dtype"}
    return dataclasses.replace(model, frozen_dtype=base_dtype, **others)


def frozen_bytes(model: ModelFacts) -> int:
    """Of all frozen weights."""
    own = model.parameters - model.adapter_parameters if has_frozen_base(model) else 0
    if not own:
        return 0
    return round(model.matmul_parameters * matrix_bytes(model) + (own - model.matmul_parameters) * other_bytes(model))


def why_not_eight_bit(model: ModelFacts) -> str | None:
    """Why the matrices of the blocks cannot be held, and multiplied, in 8 bits."""
    if model.provider != "native":
        return f"the model is computed by {model.provider}, whose linears are not ours to round"
    if not has_frozen_base(model):
        return f"all {model.trainable:,} weights are trained, and 8 bits are too few for the small steps of training"
    if model.frozen_dtype not in DTYPE_BYTES:
        return f"the base is already stored in {model.frozen_dtype}; method=lora would keep the base unrounded"
    return None


def eight_bit_saving(model: ModelFacts, stored: str, device: str) -> tuple[int, int]:
    """(weights that would be held in 8 bits, bytes less that they would take than in their files)."""
    parts = [part for part in linears(model) if _suits(model, part.name, stored, device)]
    weights, rows = model.layers * sum(part.weights for part in parts), model.layers * sum(part.outputs for part in parts)
    return weights, round(weights * (matrix_bytes(model) - 1)) - FP32 * rows
