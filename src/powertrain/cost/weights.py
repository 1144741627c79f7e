"""The weights of a model: which ones there are, which have a gradient, how they are stored, and the optimizer's state for them.

In full training the backward pass goes everywhere; with adapters on frozen weights it goes no lower than the lowest adapter.
A trained linear saves its input, for the gradient of its weight or of its adapters. A frozen one saves nothing but its weight,
and passes the gradient on, if anything below wants it. The blocks below the first adapter, and the part of the first adapted
block before its first adapter, have no backward pass and save nothing.

Trained weights are stored in fp32, frozen ones in the type of their files, in 8 bits, or in 4. The optimizer comes as
`OptimizerFacts`: bytes by kind of weight. No optimizer is known by name here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from powertrain.records import ModelFacts, OptimizerFacts
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT, FOUR_BIT, FOUR_BIT_BYTES, FP32, linear_shapes, takes_eight_bits

FIRST = ("embedding.", "position_embedding.")            # what the lowest block reads
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
    """One linear of a block, with projections of one input fused, and its adapters in a block that has some."""

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


def linears(model: ModelFacts) -> tuple[Linear, ...]:
    """Return the linears of one block in the order of their use, with the adapters of a block that has some."""
    adapters: dict[str, list[Adapter]] = {}
    for name, shape in model.shapes.items():
        match = ADAPTER.fullmatch(name)
        if match and match.group(3) == "A":
            rank, inputs = shape
            outputs = model.shapes[f"{name.removesuffix('A')}B"][0]
            adapters.setdefault(match.group(1), []).append(Adapter(inputs, rank, outputs))
    return tuple(Linear(name, inputs, outputs, tuple(adapters.get(name, ())))
                 for name, (outputs, inputs) in linear_shapes(model).items())


def lowest_layer(model: ModelFacts) -> int:
    """Return the first block that has a backward pass."""
    if not model.frozen:
        return min(model.adapted_layers, default=0)
    frozen = set(model.frozen)
    if any(name not in frozen for name in model.shapes if name.startswith(FIRST)):
        return 0
    all_of_block = sum(name.startswith("blocks.") for name in model.shapes)
    return next((layer for layer in range(model.layers) if len(frozen_in(model, layer)) < all_of_block), model.layers - 1)


def frozen_in(model: ModelFacts, layer: int) -> frozenset[str]:
    """Return the weights of a block that the recipe freezes, by their names in the block."""
    begin = f"blocks.{layer}."
    return frozenset(name.removeprefix(begin) for name in model.frozen if name.startswith(begin))


def backward_of(model: ModelFacts, layer: int) -> Backward:
    """Return the backward pass of block `layer`."""
    parts = linears(model)
    if not has_frozen_base(model):
        names = frozenset(linear.name for linear in parts)
        if not model.frozen:
            return Backward(names, names, attention=True)
        frozen = frozenset(name for name in names if f"{name}.weight" in frozen_in(model, layer))
        # of the lowest block with a backward pass all gradients of inputs are counted, though some may not be needed
        return Backward(names, names - frozen, attention=True) if layer >= lowest_layer(model) else Backward(
            frozenset(), frozenset(), attention=False)
    trained = frozenset(linear.name for linear in parts if layer in model.adapted_layers and linear.adapters)
    block = layer > lowest_layer(model)      # its input needs a gradient
    attention = block or "qkv" in trained
    read = block if model.parallel_residual else attention or "attention_out" in trained     # the input of the MLP's norm
    flows = {"qkv": block, "attention_out": attention, "mlp_in": read, "mlp_out": read or "mlp_in" in trained}
    return Backward(frozenset(name for name, needed in flows.items() if needed), trained, attention)


# ------------------------------------------------------------------------------------------------ stored bytes


def as_decoder(model: ModelFacts) -> ModelFacts:
    """Return the facts with the weights that the built-in decoder would have, by its names; of native models the same facts.

    Adapters count as lying on all linears of their blocks, with the rank that gives them about as many weights as they have.
    """
    if model.provider == "native":
        return model
    heads = model.heads or 1
    head_width = model.head_width or max(1, model.width // heads)
    found = replace(model, heads=heads, kv_heads=model.kv_heads or heads, head_width=head_width,
                    mlp_width=model.mlp_width or 4 * model.width, rotary_width=head_width)
    matrices = linear_shapes(found)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (model.vocabulary, model.width), "norm.weight": (model.width,),
        "blocks.0.attention_norm.weight": (model.width,), "blocks.0.mlp_norm.weight": (model.width,),
        **{f"blocks.0.{name}.weight": shape for name, shape in matrices.items()}}
    if not model.tied_head:
        shapes["head.weight"] = (model.vocabulary, model.width)
    if model.adapter_parameters and model.adapted_layers:
        of_rank_1 = len(model.adapted_layers) * sum(map(sum, matrices.values()))
        rank = max(1, round(model.adapter_parameters / of_rank_1))
        for name, (outputs, inputs) in matrices.items():
            shapes |= {f"blocks.0.{name}.adapters.all.A": (rank, inputs), f"blocks.0.{name}.adapters.all.B": (outputs, rank)}
    return replace(found, shapes=shapes)


def matrix_bytes(model: ModelFacts) -> float:
    """Return the bytes of one weight in the blocks' linears."""
    if not has_frozen_base(model):
        return FP32
    if model.frozen_dtype in EIGHT_BIT:
        parts = linears(model)
        return 1 + FP32 * sum(part.outputs for part in parts) / sum(part.weights for part in parts)
    return FOUR_BIT_BYTES if model.frozen_dtype in FOUR_BIT else DTYPE_BYTES[model.frozen_dtype]


def is_scaled(model: ModelFacts, name: str, device: str) -> bool:
    """Return whether the linear of that name is held and multiplied in 8 bits. Outliers, which a run measures, are left out."""
    if model.frozen_dtype not in EIGHT_BIT:
        return False
    part = next(part for part in linears(model) if part.name == name)
    return takes_eight_bits(part.outputs, part.inputs, model.frozen_dtype, device)


def left_wide_bytes(model: ModelFacts, device: str, dtype: str) -> int:
    """Return what `frozen_bytes` lacks for matrices whose sizes 8-bit products do not take: they are held in `dtype`."""
    if model.frozen_dtype not in EIGHT_BIT:
        return 0
    left = [part for part in linears(model) if not is_scaled(model, part.name, device)]
    return model.layers * sum((DTYPE_BYTES[dtype] - 1) * part.weights - FP32 * part.outputs for part in left)


def other_bytes(model: ModelFacts) -> float:
    """Return the bytes of one weight in embeddings, norms and head, which stay as they are when the matrices change type.

    An unknown type counts as fp32: an upper bound.
    """
    if not has_frozen_base(model):
        return FP32
    return DTYPE_BYTES.get(model.unquantised_dtype or model.frozen_dtype, FP32)


def as_held(model: ModelFacts, base_dtype: str | None) -> ModelFacts:
    """Return the facts with the frozen matrices of the blocks in another type than in their files; None: the same facts."""
    if base_dtype is None or not has_frozen_base(model):
        return model
    return replace(model, frozen_dtype=base_dtype, unquantised_dtype=model.unquantised_dtype or model.frozen_dtype)


def frozen_bytes(model: ModelFacts) -> int:
    """Return the bytes of all frozen weights."""
    own = model.parameters - model.adapter_parameters if has_frozen_base(model) else 0
    if not own:
        return FP32 * (model.parameters - model.trainable)       # that the recipe freezes
    return round(model.matmul_parameters * matrix_bytes(model) + (own - model.matmul_parameters) * other_bytes(model))


def why_not_eight_bit(model: ModelFacts) -> str | None:
    """Return why the matrices of the blocks cannot be held, and multiplied, in 8 bits; None if they can."""
    if model.provider != "native":
        return f"the model is computed by {model.provider}, whose linears are not ours to round"
    if not has_frozen_base(model):
        return f"all {model.trainable:,} weights are trained, and 8 bits are too few for the small steps of training"
    if model.frozen_dtype not in DTYPE_BYTES:
        return f"the base is already stored in {model.frozen_dtype}; method=lora would keep the base unrounded"
    return None


def eight_bit_saving(model: ModelFacts, stored: str, device: str) -> tuple[int, int]:
    """Return (weights that would be held in 8 bits, bytes less that they would take than in their files)."""
    parts = [part for part in linears(model) if takes_eight_bits(part.outputs, part.inputs, stored, device)]
    weights, rows = model.layers * sum(part.weights for part in parts), model.layers * sum(part.outputs for part in parts)
    return weights, round(weights * (matrix_bytes(model) - 1)) - FP32 * rows


# ------------------------------------------------------------------------------------------------ the optimizer

WEIGHT_PASSES = 3                            # fp32 read: weight, gradient; written: weight; its state is read and written
CLIP_PASSES = 3                              # the gradient: read for its norm, read and written to scale it


@dataclass(frozen=True)
class Trained:
    """Trained weights of one shape."""

    shape: tuple[int, ...]
    is_hidden: bool                          # in a block
    count: int                               # such tensors in the model

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def trained_weights(model: ModelFacts) -> Iterator[Trained]:
    """Yield the trained weights by shape: of adapters where the model has some, else of all."""
    for name, shape in model.shapes.items():
        is_adapter, is_hidden = ".adapters." in name, name.startswith("blocks.")
        count = len(model.adapted_layers) if is_adapter else model.layers if is_hidden else 1
        if model.frozen and is_hidden:
            count -= sum(name.split(".", 2)[2] in frozen_in(model, layer) for layer in range(model.layers))
        if is_adapter or not (has_frozen_base(model) or (name in model.frozen and not is_hidden) or not count):
            yield Trained(shape, is_hidden, count)


def state_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> int:
    """Return the bytes of the optimizer's state, with the weights' average. Without shapes, all count as hidden matrices."""
    average_bytes = optimizer.average_bytes * model.trainable
    alike = optimizer.hidden_bytes == optimizer.outside_bytes == optimizer.vector_bytes and not optimizer.line_bytes
    weights = [] if alike else list(trained_weights(model))
    if sum(one.count * math.prod(one.shape) for one in weights) != model.trainable:
        return round(optimizer.hidden_bytes * model.trainable + average_bytes)
    total = average_bytes
    for one in weights:
        per_weight = optimizer.vector_bytes if not one.is_matrix else \
            optimizer.hidden_bytes if one.is_hidden else optimizer.outside_bytes
        total += one.count * (per_weight * math.prod(one.shape) + optimizer.line_bytes * sum(one.shape) * one.is_matrix)
    return round(total)


def checkpoint_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> int:
    """Return the bytes of a checkpoint, and of the copy that is written: trained weights in fp32, and the optimizer's state."""
    return FP32 * model.trainable + state_bytes(model, optimizer)


def update_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> float:
    """Return the bytes that the update alone reads and writes, each tensor once."""
    return FP32 * WEIGHT_PASSES * model.trainable + 2 * state_bytes(model, optimizer)


def update_flops(model: ModelFacts, optimizer: OptimizerFacts) -> float:
    """Return the FLOPs of the matrix products in an update: those that make hidden matrices orthogonal.

    A round on a matrix of m x n, m the smaller: two products of 2mmn and one of 2mmm. Source: the Newton-Schulz iteration
    in torch.optim.Muon.
    """
    total = 0.0
    for one in trained_weights(model) if optimizer.orthogonalising_rounds else ():
        if one.is_hidden and one.is_matrix:
            small, large = sorted(one.shape)
            total += one.count * optimizer.orthogonalising_rounds * (4.0 * small * small * large + 2.0 * small**3)
    return total


def tensor_part(model: ModelFacts, degree: int) -> ModelFacts:
    """Return the facts of what one process computes where `degree` of them divide the matrices of each block.

    Where heads are left over, which is refused in the end, it is the process with the most.
    """
    if degree == 1:
        return model
    model = as_decoder(model)
    part = replace(model, heads=-(-model.heads // degree), kv_heads=-(-model.kv_heads // degree),
                   mlp_width=-(-model.mlp_width // degree))
    matrices = linear_shapes(part)
    shapes = {name: _part_of(name, shape, matrices) for name, shape in model.shapes.items()}
    held = sum(math.prod(shape) * (model.layers if name.startswith("blocks.") else 1) for name, shape in shapes.items())
    return replace(part, shapes=shapes, parameters=held, trainable=held, matmul_parameters=model.matmul_parameters // degree)


def _part_of(name: str, shape: tuple[int, ...], matrices: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    """Return the shape of one process's part of a weight; the biases of attention_out and mlp_out, and norms, are whole."""
    *_, linear, kind = name.split(".")
    if linear not in matrices:
        return shape
    outputs, _ = matrices[linear]
    return matrices[linear] if kind == "weight" else (outputs,)
