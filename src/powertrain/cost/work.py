"""What one optimizer step has to compute and to move, counted exactly from the model's shape.

A multiplication and an addition are two FLOPs. A linear layer of k inputs and n outputs costs 2kn per token forward
and 4kn backward (the gradients of its input and of its weight). A query that sees s keys costs 4*s*d_q forward (scores
and the weighted sum, d_q = heads x head width) and 8*s*d_q backward. Causality is counted exactly: a document of l
tokens has l(l+1)/2 pairs of query and key, not l*l, and tokens see nothing of other documents. Looking up an embedding
is no multiplication; the head is one, tied or not. Hence per token, with P in the blocks' linear layers, H in the head:

    forward  2(P + H) + 4 L s d_q        training  three times that        s = sum of l(l+1) / 2T

With adapters (A weights) on frozen weights, the backward pass makes no gradient of a frozen weight, and none of anything
below the lowest adapter: 2P' + 2H + 8 L' s d_q, P' and L' counting what has a backward pass (gradients.py), and 4A for
the adapters. Where the loss is computed in chunks, rows that train nothing never reach the head: H counts by their share.

Source: shared reference on performance, section 3.1; PaLM (arXiv 2204.02311, appendix B) counts the full l*l instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.cost.gradients import (
    adapter_dropout,
    adapter_tensors,
    backward_of,
    has_frozen_base,
    linears,
    lowest_layer,
)
from powertrain.cost.stored import DTYPE_BYTES, matrix_bytes, other_bytes
from powertrain.records import ModelFacts

BACKWARD_SHARE = 2                           # backward over forward: two products for each one of the forward pass
ADAMW_PASSES = 3                             # fp32 read: weight, gradient; written: weight; its moments are read and written
CLIP_PASSES = 3                              # the gradient: read for its norm, read and written to scale it


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step, or of one evaluation pass."""

    dtype: str                               # of the matrix products: "fp32", "bf16", ...
    tokens: int
    flops: float                             # model FLOPs: what the mathematics needs
    recompute_flops: float                   # on top: what activation checkpointing computes a second time
    gemm_bytes: float                        # operands and results of the matrix products, each moved once a product
    elementwise_bytes: float                 # everything between the products, as eager PyTorch moves it
    optimizer_bytes: float                   # clipping and AdamW
    operators: int                           # kernels or operator calls, as eager PyTorch starts them
    dropout_elements: float                  # random numbers drawn

    @property
    def hardware_flops(self) -> float:
        """What the machine computes: the model's FLOPs and the recomputed ones."""
        return self.flops + self.recompute_flops

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.tokens


def mean_keys(lengths: Sequence[int], window: int | None = None) -> float:
    """Keys that a query sees on average, over documents of these lengths: sum of l(l+1) / 2T, at most `window` each."""
    pairs = 0
    for length in lengths:
        beyond = max(0, length - window) if window is not None else 0
        within = length - beyond
        pairs += within * (within + 1) // 2 + beyond * within
    return pairs / sum(lengths)


def forward_flops(model: ModelFacts, lengths: Sequence[int], head_share: float = 1.0) -> float:
    """FLOPs of one forward pass over documents of these lengths, with the head on `head_share` of the tokens."""
    linear = 2.0 * (model.matmul_parameters + head_share * model.head_parameters + model.adapter_parameters)
    return sum(lengths) * (linear + model.layers * _attention_flops_per_token(model, lengths))


def training_flops(model: ModelFacts, lengths: Sequence[int], head_share: float = 1.0) -> float:
    """FLOPs of forward and backward. Recomputation is not in it."""
    forward = forward_flops(model, lengths, head_share)
    if not has_frozen_base(model):
        return (1 + BACKWARD_SHARE) * forward
    return forward + sum(lengths) * _frozen_backward_flops_per_token(model, lengths, head_share)


def _frozen_backward_flops_per_token(model: ModelFacts, lengths: Sequence[int], head_share: float) -> float:
    total = 2.0 * head_share * model.head_parameters
    attention = BACKWARD_SHARE * _attention_flops_per_token(model, lengths)
    for layer in range(model.layers):
        backward = backward_of(model, layer)
        total += attention if backward.attention else 0.0
        for linear in linears(model):
            needed = linear.name in backward.needed
            total += 2.0 * linear.weights if needed else 0.0
            if linear.name in backward.trained:  # gradients of B, of what B reads, of A, and of the input if it needs one
                total += sum(2.0 * adapter.rank * (2 * adapter.outputs + (2 if needed else 1) * adapter.inputs)
                             for adapter in linear.adapters)
    return total


def recomputed_flops(model: ModelFacts, lengths: Sequence[int], checkpointed_layers: int) -> float:
    """FLOPs that checkpointing `checkpointed_layers` whole blocks adds: their forward pass once more.

    Without dropout behind it, nothing needs the last frozen product of a block, and it is not made again.
    """
    weights = (model.matmul_parameters + model.adapter_parameters) / model.layers
    if has_frozen_base(model) and model.dropout == 0:
        weights -= model.mlp_width * model.width
    return sum(lengths) * (2.0 * weights + _attention_flops_per_token(model, lengths)) * checkpointed_layers


def step_work(model: ModelFacts, micro_batches: Sequence[Sequence[int]], dtype: str, *,
              checkpointed_layers: int = 0, head_share: float = 1.0, moment_bytes: float = 8.0) -> Work:
    """The work of one optimizer step.

    `micro_batches`: for each forward pass of the step the lengths of its documents. Weights move once per micro-batch,
    the optimizer runs once per step.
    """
    lengths = [length for batch in micro_batches for length in batch]
    tokens, passes = sum(lengths), len(micro_batches)
    forward_passes = 1 + checkpointed_layers / model.layers
    return Work(
        dtype=dtype, tokens=tokens,
        flops=training_flops(model, lengths, head_share),
        recompute_flops=recomputed_flops(model, lengths, checkpointed_layers),
        gemm_bytes=_step_gemm_bytes(model, tokens, passes, dtype, forward_passes, head_share),
        elementwise_bytes=_elementwise_bytes(model, tokens, passes, dtype, forward_passes, head_share),
        optimizer_bytes=(4.0 * (ADAMW_PASSES + CLIP_PASSES) + 2 * moment_bytes) * model.trainable,
        operators=passes * _operators(model, dtype, forward_passes) + OPTIMIZER_OPERATORS * _weights(model),
        dropout_elements=_dropout_elements(model, lengths),
    )


def evaluation_work(model: ModelFacts, batches: Sequence[Sequence[int]], dtype: str) -> Work:
    """The work of forward passes alone, without dropout: one per entry of `batches`, the lengths of its documents."""
    lengths = [length for batch in batches for length in batch]
    tokens, passes = sum(lengths), len(batches)
    return Work(
        dtype=dtype, tokens=tokens, flops=forward_flops(model, lengths), recompute_flops=0.0,
        gemm_bytes=_gemm_bytes(model, tokens, passes, dtype),
        elementwise_bytes=_forward_elementwise_bytes(model, tokens, passes, dtype), optimizer_bytes=0.0,
        operators=passes * (FORWARD_OPERATORS * model.layers + HEAD_OPERATORS), dropout_elements=0.0,
    )


def _attention_flops_per_token(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Of one block, forward."""
    return 4.0 * mean_keys(lengths, model.window) * model.heads * model.head_width


# ------------------------------------------------------------------------------------------------ bytes moved


def _gemm_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str, head_share: float = 1.0) -> float:
    """Bytes of one round of matrix products: for each layer its input, its weight and its output once.

    The backward pass of full training moves the same three twice: dY, W -> dX and X, dY -> dW.
    """
    block = sum(_product_bytes(tokens, passes, linear.inputs, linear.outputs) for linear in linears(model))
    head = _product_bytes(head_share * tokens, passes, model.width, model.vocabulary)
    return DTYPE_BYTES[dtype] * (model.layers * block + head)


def _product_bytes(rows: float, passes: int, inputs: int, outputs: int) -> float:
    """Elements that a product of (rows, inputs) and (inputs, outputs) moves, the matrix once a pass."""
    return rows * (inputs + outputs) + passes * inputs * outputs


def _step_gemm_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str, forward_passes: float,
                     head_share: float) -> float:
    """Of a step. A frozen linear has one product in the backward pass, dX, and only if something below needs it."""
    if not has_frozen_base(model):
        return (forward_passes + BACKWARD_SHARE) * _gemm_bytes(model, tokens, passes, dtype, head_share)
    elements = _product_bytes(head_share * tokens, passes, model.width, model.vocabulary) * 2
    for layer in range(model.layers):
        backward = backward_of(model, layer)
        for linear in linears(model):
            rounds = forward_passes + (linear.name in backward.needed)
            elements += rounds * _product_bytes(tokens, passes, linear.inputs, linear.outputs)
            if linear.name in backward.trained:
                elements += (forward_passes + BACKWARD_SHARE) * sum(
                    tokens * (adapter.inputs + 2 * adapter.rank + adapter.outputs) + passes * adapter.weights
                    for adapter in linear.adapters)
    return DTYPE_BYTES[dtype] * elements


def _forward_elementwise_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str, head_share: float = 1.0) -> float:
    """Bytes that the forward pass moves between products, in eager PyTorch.

    Per token and block, reads and writes of width d, query and key width q, MLP width f: two norms 2 x 2d; two residual
    additions 2 x 3d; rotation 3q; activation 2f, and 3f for the gate's product; three times its output for each adapter,
    which is added to that. Then the loss: logits read and written as fp32 log-probabilities. Weights that are not stored
    in the product type are cast once per micro-batch (fp32 and 16 bits: read 4, write 2).
    """
    item = DTYPE_BYTES[dtype]
    rotated = (model.heads + model.kv_heads) * model.head_width
    block = 4 * (4 + 6) * model.width + item * (3 * rotated + (5 if model.gated_mlp else 2) * model.mlp_width)
    added = item * 3 * sum(adapter.outputs for linear in linears(model) for adapter in linear.adapters)
    loss = head_share * (item + 2 * 4) * model.vocabulary
    return tokens * (model.layers * block + len(model.adapted_layers) * added + loss) + passes * _cast_bytes(model, dtype)


def _cast_bytes(model: ModelFacts, dtype: str) -> float:
    """Bytes of making every matrix once in the product type: read as it is stored, written."""
    item = DTYPE_BYTES[dtype]
    return sum(weights * (stored + item) for weights, stored in
               ((model.matmul_parameters, matrix_bytes(model)), (model.head_parameters, other_bytes(model))) if stored != item)


def _elementwise_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str, forward_passes: float,
                       head_share: float) -> float:
    """Forward as above; backward twice that: each operator reads its saved input and the gradient, writes a gradient.

    Gradients of weights accumulate in fp32 across micro-batches: read, read, written once per micro-batch.
    """
    rounds = forward_passes + BACKWARD_SHARE * _share_with_backward(model)
    accumulated = 3.0 * 4 * passes * model.trainable
    return rounds * _forward_elementwise_bytes(model, tokens, passes, dtype, head_share) + accumulated


def _share_with_backward(model: ModelFacts) -> float:
    """Of the blocks."""
    return 1 - lowest_layer(model) / model.layers


# ------------------------------------------------------------------------------------------------ operator calls

FORWARD_OPERATORS = 20                       # of one block in eager PyTorch: 4 linears, 2 norms, rotation, attention
HEAD_OPERATORS = 8                           # embedding, last norm, head, loss
CAST_OPERATORS = 4                           # of one block under autocast: one per weight
ADAPTER_OPERATORS = 5                        # of one adapter: A, scale, B, addition, and its part of the output
OPTIMIZER_OPERATORS = 2                      # per weight, several tensors a kernel or one after another


def _operators(model: ModelFacts, dtype: str, forward_passes: float) -> int:
    """Operator calls of one micro-batch; backward starts about twice as many as forward."""
    casts = CAST_OPERATORS if matrix_bytes(model) != DTYPE_BYTES[dtype] else 0
    rounds = forward_passes + BACKWARD_SHARE * _share_with_backward(model)
    adapters = len(model.adapted_layers) * ADAPTER_OPERATORS * sum(len(linear.adapters) for linear in linears(model))
    return round((model.layers * (FORWARD_OPERATORS + casts) + adapters) * rounds + HEAD_OPERATORS * (1 + BACKWARD_SHARE))


def _weights(model: ModelFacts) -> int:
    """How many weight tensors the optimizer updates, about: those of one block in each, and those outside."""
    if has_frozen_base(model):
        return len(model.adapted_layers) * len(adapter_tensors(model))
    return model.layers * len(model.shapes)


def _dropout_elements(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Random numbers of one forward pass: embedding, attention weights (l*l a head), two residual branches a block, and
    the inputs of adapters.
    """
    tokens, total = sum(lengths), 0
    if model.dropout:
        pairs = sum(length * length for length in lengths)
        total += tokens * model.width * (1 + 2 * model.layers) + model.layers * model.heads * pairs
    if adapter_dropout(model):
        inputs = sum(adapter.inputs for linear in linears(model) for adapter in linear.adapters)
        total += tokens * inputs * len(model.adapted_layers)
    return float(total)
