"""What one optimizer step has to compute and to move, counted exactly from the model's shape.

A multiplication and an addition are two FLOPs. A linear layer of k inputs and n outputs costs 2kn per token forward
and 4kn backward (the gradients of its input and of its weight). A query that sees s keys costs 4*s*d_q forward (scores
and the weighted sum, d_q = heads x head width) and 8*s*d_q backward. Causality is counted exactly: a document of l
tokens has l(l+1)/2 pairs of query and key, not l*l, and tokens see nothing of other documents. Looking up an embedding
is no multiplication; the head is one, tied or not. Hence per token, with P in the blocks' linear layers, H in the head:

    forward  2(P + H) + 4 L s d_q        training  three times that        s = sum of l(l+1) / 2T

Source: shared reference on performance, section 3.1; PaLM (arXiv 2204.02311, appendix B) counts the full l*l instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.records import ModelFacts

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
BACKWARD_SHARE = 2                           # backward over forward: two products for each one of the forward pass
ADAMW_PASSES = 7                             # fp32 read: weight, gradient, two moments; written: weight, two moments
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


def mean_keys(lengths: Sequence[int]) -> float:
    """Keys that a query sees on average, over documents of these lengths: sum of l(l+1) / 2T."""
    return sum(length * (length + 1) for length in lengths) / (2 * sum(lengths))


def forward_flops(model: ModelFacts, lengths: Sequence[int]) -> float:
    """FLOPs of one forward pass over documents of these lengths, with the head on every token."""
    linear = 2.0 * (model.matmul_parameters + model.head_parameters)
    return sum(lengths) * (linear + _attention_flops_per_token(model, lengths))


def training_flops(model: ModelFacts, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward with every weight trained. Recomputation is not in it."""
    return (1 + BACKWARD_SHARE) * forward_flops(model, lengths)


def recomputed_flops(model: ModelFacts, lengths: Sequence[int], checkpointed_layers: int) -> float:
    """FLOPs that checkpointing `checkpointed_layers` whole blocks adds: their forward pass once more."""
    per_token = 2.0 * model.matmul_parameters + _attention_flops_per_token(model, lengths)
    return sum(lengths) * per_token * checkpointed_layers / model.layers


def checkpointed_layers(model: ModelFacts, every: int) -> int:
    """How many blocks are computed again when every `every`-th one, from the first, keeps only its input; 0: none."""
    return math.ceil(model.layers / every) if every else 0


def step_work(model: ModelFacts, micro_batches: Sequence[Sequence[int]], dtype: str, *,
              checkpointed_layers: int = 0) -> Work:
    """The work of one optimizer step of full training.

    `micro_batches`: for each forward pass of the step the lengths of its documents. Weights move once per micro-batch,
    the optimizer runs once per step.
    """
    lengths = [length for batch in micro_batches for length in batch]
    tokens, passes = sum(lengths), len(micro_batches)
    forward_passes = 1 + checkpointed_layers / model.layers
    return Work(
        dtype=dtype, tokens=tokens,
        flops=training_flops(model, lengths),
        recompute_flops=recomputed_flops(model, lengths, checkpointed_layers),
        gemm_bytes=(forward_passes + BACKWARD_SHARE) * _gemm_bytes(model, tokens, passes, dtype),
        elementwise_bytes=_elementwise_bytes(model, tokens, passes, dtype, forward_passes),
        optimizer_bytes=4.0 * (ADAMW_PASSES + CLIP_PASSES) * model.trainable,
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
    return 4.0 * model.layers * mean_keys(lengths) * model.heads * model.head_width


# ------------------------------------------------------------------------------------------------ bytes moved


def _linear_layers(model: ModelFacts) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one block, projections of one input fused."""
    queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    gates = 2 if model.gated_mlp else 1
    return [(model.width, queries + 2 * keys), (queries, model.width),
            (model.width, gates * model.mlp_width), (model.mlp_width, model.width)]


def _gemm_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str) -> float:
    """Bytes of one round of matrix products: for each layer its input, its weight and its output once.

    The backward pass moves the same three twice: dY, W -> dX and X, dY -> dW.
    """
    layers = [*_linear_layers(model) * model.layers, (model.width, model.vocabulary)]
    return float(DTYPE_BYTES[dtype] * sum(tokens * (k + n) + passes * k * n for k, n in layers))


def _forward_elementwise_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str) -> float:
    """Bytes that the forward pass moves between products, in eager PyTorch.

    Per token and block, reads and writes of width d, query and key width q, MLP width f: two norms 2 x 2d; two residual
    additions 2 x 3d; rotation 3q; activation 2f, and 3f for the gate's product. Then the loss: logits read and written
    as fp32 log-probabilities. With a 16-bit product type the weights are cast once per micro-batch (read 4, write 2).
    """
    item = DTYPE_BYTES[dtype]
    rotated = (model.heads + model.kv_heads) * model.head_width
    block = 4 * (4 + 6) * model.width + item * (3 * rotated + (5 if model.gated_mlp else 2) * model.mlp_width)
    loss = (item + 2 * 4) * model.vocabulary
    casts = passes * (4 + item) * (model.matmul_parameters + model.head_parameters) if item < 4 else 0
    return float(tokens * (model.layers * block + loss) + casts)


def _elementwise_bytes(model: ModelFacts, tokens: int, passes: int, dtype: str, forward_passes: float) -> float:
    """Forward as above; backward twice that: each operator reads its saved input and the gradient, writes a gradient.

    Gradients of weights accumulate in fp32 across micro-batches: read, read, written once per micro-batch.
    """
    rounds = forward_passes + BACKWARD_SHARE
    accumulated = 3.0 * 4 * passes * model.trainable
    return rounds * _forward_elementwise_bytes(model, tokens, passes, dtype) + accumulated


# ------------------------------------------------------------------------------------------------ operator calls

FORWARD_OPERATORS = 20                       # of one block in eager PyTorch: 4 linears, 2 norms, rotation, attention
HEAD_OPERATORS = 8                           # embedding, last norm, head, loss
CAST_OPERATORS = 4                           # of one block under autocast: one per weight
OPTIMIZER_OPERATORS = 2                      # per weight, several tensors a kernel or one after another


def _operators(model: ModelFacts, dtype: str, forward_passes: float) -> int:
    """Operator calls of one micro-batch; backward starts about twice as many as forward."""
    casts = CAST_OPERATORS if DTYPE_BYTES[dtype] < 4 else 0
    block = (FORWARD_OPERATORS + casts) * (forward_passes + BACKWARD_SHARE)
    return round(model.layers * block + HEAD_OPERATORS * (1 + BACKWARD_SHARE))


def _weights(model: ModelFacts) -> int:
    """How many weight tensors the optimizer updates, about: those of one block in each, and those outside."""
    return model.layers * len(model.shapes)


def _dropout_elements(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Random numbers of one forward pass: embedding, attention weights (l*l a head), two residual branches a block."""
    if model.dropout == 0:
        return 0.0
    pairs = sum(length * length for length in lengths)
    return float(sum(lengths) * model.width * (1 + 2 * model.layers) + model.layers * model.heads * pairs)
