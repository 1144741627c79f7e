"""The memory of one of the processes that divide weights, gradients and optimizer state among them, as FSDP does.

Each tensor is divided by its rows; the first process has the most, so its part is what counts. What is gathered comes on top:
all weights below stage 3; then the weights outside the blocks, a block, and the one that is fetched ahead, each with the buffer
that it arrives in. Gradients are whole at stage 1; from stage 2 on those outside the blocks are, until they are summed, and
those of one block, with their buffer. Not all of that is there at the same moment, so the sum is an upper bound.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from powertrain.cost.weights import as_decoder, has_frozen_base, matrix_bytes, other_bytes, state_bytes
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts, OptimizerFacts
from powertrain.shapes import FP32, linear_shapes

WEIGHTS_STAGE, GRADIENTS_STAGE = 3, 2        # of ZeRO: from here on weights, and gradients, are divided
BLOCKS_GATHERED, GRADIENTS_GATHERED = 4, 2   # blocks whose weights, and whose gradients, are whole at once, with their buffers


@dataclass(frozen=True)
class Tensors:
    """Weights of one shape."""

    shape: tuple[int, ...]
    item: float                              # bytes of a weight
    count: int
    is_trained: bool
    is_hidden: bool                          # in a block

    def part(self, shards: int) -> int:
        """Return the elements of one of them that the first of `shards` processes holds."""
        rows, *rest = self.shape or (1,)
        return -(-rows // shards) * math.prod(rest)


def standing_bytes(model: ModelFacts, optimizer: OptimizerFacts) -> int:
    """Return the bytes of weights, gradients and optimizer state."""
    return round(sum(one.count * one.part(1) * (one.item + FP32 * one.is_trained) for one in tensors_of(model))
                 ) + state_bytes(model, optimizer)


def divided(held: Mapping[str, int], model: ModelFacts, workload: Workload) -> dict[str, int]:
    """Return the components of a peak, given for whole weights, as they are where `workload.shards` processes divide them."""
    shards, found = workload.shards, list(tensors_of(model))
    trained = [one for one in found if one.is_trained]
    share = _elements(trained, shards) / _elements(trained, 1)
    gathered_bytes, gradient_bytes = sum(one.count * one.part(1) * one.item for one in found), held.get("gradients", 0)
    if workload.sharded_stage >= GRADIENTS_STAGE:
        gradient_bytes = FP32 * (_elements(trained, shards) + sum(
            one.part(1) * (GRADIENTS_GATHERED if one.is_hidden else 1) for one in trained))
    if workload.sharded_stage >= WEIGHTS_STAGE:
        gathered_bytes = sum(one.item * one.part(1) * (BLOCKS_GATHERED if one.is_hidden else 1) for one in found)
    return {**held, "weights": round(sum(one.count * one.part(shards) * one.item for one in found)),
            "gathered weights": round(gathered_bytes), "gradients": gradient_bytes,
            "optimizer": round(share * held.get("optimizer", 0))}


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


def tensors_of(model: ModelFacts) -> Iterator[Tensors]:
    """Yield the weights by shape."""
    frozen = has_frozen_base(model)
    for name, shape in model.shapes.items():
        is_adapter, is_hidden = ".adapters." in name, name.startswith("blocks.")
        is_matrix = is_hidden and len(shape) == 2
        item = FP32 if is_adapter or not frozen else matrix_bytes(model) if is_matrix else other_bytes(model)
        count = len(model.adapted_layers) if is_adapter else model.layers if is_hidden else 1
        yield Tensors(shape, item, count, is_adapter or not frozen, is_hidden)


def _elements(tensors: list[Tensors], shards: int) -> int:
    return sum(one.count * one.part(shards) for one in tensors)
