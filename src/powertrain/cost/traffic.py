"""What one optimizer step moves: the operands of its products, everything between them, conversions of weights, the optimizer.
And how many operator calls eager PyTorch makes of it, and what activation checkpointing computes again.

Every product moves its two operands and its result once. Between products the count follows what eager PyTorch runs,
operator by operator, as listed below; caches make a CPU move less of it, and fusion less still.

Autograd's non-reentrant checkpoint recomputes a block up to the last tensor that a gradient needs, and stops there. Without
dropout behind it that is the input of the down projection, whose product is never computed again; with DoRA on it (and no
dropout, which gives DoRA a product of its own) it is needed for the gradient of the magnitudes. Where the frozen matrix is
made wide for each product, nothing of that is saved, and the last thing is what the adapter's B reads: B's product is left out.

Legend: per token width d, query and key width q, MLP width f; item: bytes of a number in the product type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from powertrain.cost.weights import (
    Linear,
    adapter_dropout,
    adapter_tensors,
    backward_of,
    has_frozen_base,
    linears,
    lowest_layer,
    matrix_bytes,
    other_bytes,
)
from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT, FOUR_BIT, FP32

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


def recompute_flops(model: ModelFacts, tokens: int, saved: Mapping[str, str], blocks: int) -> float:
    """Return the FLOPs of the products that fused blocks do not keep (models/kernels/fused/saving.py) and compute again."""
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


# ------------------------------------------------------------------------------------------------ bytes

BACKWARD_SHARE = 2                           # backward over forward: two products for each one of the forward pass
DORA_PASSES = 5                              # fp32 of W's size: BA written, W and BA read, the sum written and read

FORWARD_OPERATORS = 20                       # of one block in eager PyTorch: 4 linears, 2 norms, rotation, attention
HEAD_OPERATORS = 8                           # embedding, last norm, head, loss
CAST_OPERATORS = 4                           # of one block under autocast: one per weight
ADAPTER_OPERATORS = 5                        # of one adapter: A, scale, B, addition, and its part of the output
OPTIMIZER_OPERATORS = 2                      # per weight, several tensors a kernel or one after another


@dataclass(frozen=True)
class Traffic:
    """What `passes` forward passes of `tokens` slots in all move, and their backward passes."""

    model: ModelFacts
    tokens: int
    passes: int
    dtype: str
    checkpoint_every: int = 0
    head_share: float = 1.0

    @property
    def item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        return recomputed_of(self.model, self.checkpoint_every, self.dtype)

    # -------------------------------------------------------------------------------------------- products

    def gemm_bytes(self) -> float:
        """Of all products: forward, again where a block is recomputed, and backward.

        The backward pass of a trained linear moves the same three twice (dY, W -> dX and X, dY -> dW), that of a frozen
        one once, and only if something below needs its dX.
        """
        elements = self._product(self.head_share * self.tokens, self.model.width, self.model.vocabulary) * self._head_rounds()
        for linear, rounds, adapter_rounds in self._rounds():
            elements += rounds * self._product(self.tokens, linear.inputs, linear.outputs)
            elements += adapter_rounds * sum(
                self.tokens * (adapter.inputs + 2 * adapter.rank + adapter.outputs) + self.passes * adapter.weights
                for adapter in linear.adapters)
        return self.item * elements

    def _product(self, rows: float, inputs: int, outputs: int) -> float:
        """Elements that a product of (rows, inputs) and (inputs, outputs) moves, the matrix once a pass."""
        return rows * (inputs + outputs) + self.passes * inputs * outputs

    def _head_rounds(self) -> int:
        return 2 if has_frozen_base(self.model) else 1 + BACKWARD_SHARE

    def _rounds(self) -> Iterator[tuple[Linear, int, int]]:
        """Each linear of each block, how often its product is made in a pass, and how often those of its adapters are."""
        again = {block.layer: block for block in self.recomputed}
        for layer in range(self.model.layers):
            backward = backward_of(self.model, layer)
            for linear in linears(self.model):
                second = layer in again and linear.name not in again[layer].left_out
                rounds = 1 + second + (linear.name in backward.needed) + (not has_frozen_base(self.model))
                adapted = bool(linear.adapters) and layer in self.model.adapted_layers
                yield linear, rounds, (1 + (layer in again) + BACKWARD_SHARE) * adapted

    # -------------------------------------------------------------------------------------------- between products

    def elementwise_bytes(self) -> float:
        """Forward; backward twice that: each operator reads its saved input and the gradient, writes a gradient.

        Gradients of weights accumulate in fp32 across passes: read, read, written once a pass.
        """
        share = BACKWARD_SHARE * self._share_with_backward()
        blocks = self._block_bytes() * (self.model.layers * (1 + share) + len(self.recomputed))
        again = sum(block.adapted for block in self.recomputed)
        adapted = self._adapter_bytes() * (len(self.model.adapted_layers) * (1 + share) + again)
        loss = self.head_share * (self.item + 2 * FP32) * self.model.vocabulary * (1 + share)
        accumulated = 3.0 * FP32 * self.passes * self.model.trainable
        return self.tokens * (blocks + adapted + loss) + accumulated + self.passes * self.conversion_bytes()

    def _block_bytes(self) -> float:
        """Of a token and a block, read and written: two norms 2 x 2d; two residual additions 2 x 3d; rotation 3q; the
        activation 2f, and 3f for the gate's product.
        """
        model = self.model
        rotated = (model.heads + model.kv_heads) * model.head_width
        return FP32 * (4 + 6) * model.width + self.item * (3 * rotated + (5 if model.gated_mlp else 2) * model.mlp_width)

    def _adapter_bytes(self) -> float:
        """Of a token and an adapted block: three times the output of each adapter, which is added to that."""
        return self.item * 3.0 * sum(adapter.outputs for linear in linears(self.model) for adapter in linear.adapters)

    def _share_with_backward(self) -> float:
        """Of the blocks."""
        return 1 - lowest_layer(self.model) / self.model.layers

    # -------------------------------------------------------------------------------------------- conversions

    def conversion_bytes(self) -> float:
        """Of one pass: making matrices in the product type out of what they are stored in, read there and written.

        Autocast converts a trained matrix once a pass (again where its block is recomputed), and its gradient back to
        fp32. A frozen one is made for each of its products, forward and backward; out of 4 bits too, there once more for
        the parts of a fused projection, which are unpacked apart and copied together. DoRA reads all rows in fp32.
        """
        item, model = self.item, self.model
        if not has_frozen_base(model):
            return self._trained_conversion_bytes() if item != FP32 else 0.0
        stored, head = matrix_bytes(model), other_bytes(model)
        total = float(model.head_parameters * (head + item)) if head != item else 0.0
        dora = {linear.name for linear in linears(model) if self._has_magnitude(linear)}
        for linear, rounds, adapter_rounds in self._rounds():
            each = stored + item if stored != item and model.frozen_dtype not in EIGHT_BIT else 0.0
            each += 2 * item if model.frozen_dtype in FOUR_BIT and linear.name == "qkv" else 0
            total += rounds * linear.weights * each
            if linear.name in dora and adapter_rounds:
                made = adapter_rounds - BACKWARD_SHARE
                wide = stored + FP32 if stored != FP32 else 0.0
                total += made * linear.weights * (wide + DORA_PASSES * FP32)
        return total

    def _trained_conversion_bytes(self) -> float:
        model, both_ways = self.model, 2
        again = len(self.recomputed) / model.layers
        return (FP32 + self.item) * (model.matmul_parameters * (both_ways + again) + model.head_parameters * both_ways)

    def _has_magnitude(self, linear: Linear) -> bool:
        return any(f".{linear.name}." in name and name.endswith(".magnitude") for name in self.model.shapes)

    # -------------------------------------------------------------------------------------------- operator calls

    def operators(self) -> int:
        """Backward starts about twice as many as forward."""
        model = self.model
        casts = CAST_OPERATORS if matrix_bytes(model) != self.item else 0
        share = BACKWARD_SHARE * self._share_with_backward()
        rounds = 1 + len(self.recomputed) / model.layers + share
        adapters = len(model.adapted_layers) * ADAPTER_OPERATORS * sum(len(linear.adapters) for linear in linears(model))
        head = HEAD_OPERATORS * (1 + BACKWARD_SHARE)
        passes = self.passes * round((model.layers * (FORWARD_OPERATORS + casts) + adapters) * rounds + head)
        return passes + OPTIMIZER_OPERATORS * self._weights()

    def _weights(self) -> int:
        """How many weight tensors the optimizer updates, about: those of one block in each, and those outside."""
        if has_frozen_base(self.model):
            return len(self.model.adapted_layers) * len(adapter_tensors(self.model))
        return self.model.layers * len(self.model.shapes)
