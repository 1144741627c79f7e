"""Where the backward pass goes: everywhere in full training; with adapters on frozen weights no lower than the lowest one.

A linear that is trained saves its input, for the gradient of its weight or of its adapters. A frozen one saves nothing
but its weight, and passes the gradient on, if anything below wants it. Below the first adapter nothing does: those
blocks, and the part of the first adapted block before its first adapter, have no backward pass and save nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from powertrain.records import ModelFacts
from powertrain.shapes import linear_shapes

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
    """One block's backward pass: whose inputs need a gradient, and what is trained."""

    needed: frozenset[str]                   # linears with a gradient of their input
    trained: frozenset[str]                  # linears with a gradient of their weight, or of their adapters
    kept: frozenset[str]                     # those of them that keep their input; dropout gives each adapter another one
    block: bool                              # the block's input needs one
    attention: bool                          # queries, keys and values need one
    middle: bool                             # the residual between attention and MLP
    mlp: bool                                # what the MLP's first linear gives

    @property
    def any(self) -> bool:
        return self.block or bool(self.trained)


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
    """The backward pass of block `layer`."""
    if not has_frozen_base(model):
        names = frozenset(linear.name for linear in linears(model))
        return Backward(names, names, names, block=True, attention=True, middle=True, mlp=True)
    adapted = layer in model.adapted_layers
    trained = frozenset(linear.name for linear in linears(model) if adapted and linear.adapters)
    block = layer > lowest_layer(model)
    attention = block or "qkv" in trained
    middle = attention or "attention_out" in trained
    read = block if model.parallel_residual else middle      # what the MLP's norm reads
    mlp = read or "mlp_in" in trained
    flows = {"qkv": block, "attention_out": attention, "mlp_in": read, "mlp_out": mlp}
    kept = frozenset() if adapter_dropout(model) else trained
    return Backward(frozenset(name for name, needed in flows.items() if needed), trained, kept, block, attention, middle, mlp)
