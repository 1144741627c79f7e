"""What one optimizer step has to compute, counted exactly from the model's shape; traffic.py counts what it moves.

A multiplication and an addition are two FLOPs. A linear layer of k inputs and n outputs costs 2kn per token forward
and 4kn backward (the gradients of its input and of its weight). A query that sees s keys costs 4*s*d_q forward (scores
and the weighted sum, d_q = heads x head width) and 8*s*d_q backward. Causality is counted exactly: a document of l
tokens has l(l+1)/2 pairs of query and key, not l*l, and tokens see nothing of other documents; what a kernel computes
beyond that (masked halves of tiles, scores made again in the backward pass) is not counted. Looking up an embedding is
no multiplication; the head is one, tied or not. Hence per token, with P in the blocks' linear layers, H in the head:

    forward  2(P + H) + 4 L s d_q        training  three times that        s = sum of l(l+1) / 2T

With adapters (A weights) on frozen weights, the backward pass makes no gradient of a frozen weight, and none of anything
below the lowest adapter: 2P' + 2H + 8 L' s d_q, P' and L' counting what has a backward pass (gradients.py), and 4A for
the adapters less 2rk where A's input needs no gradient. Where the loss is computed in chunks, rows that train nothing
never reach the head: H counts by their share. DoRA makes the lengths of W + BA's rows once a pass, 2rkn; with dropout its
W meets a second input, 2kn, and 2kn backward where that needs a gradient. All adapted blocks count as having the adapters
of the first of them.

Checked against torch's FlopCounterMode: equal for every family and method, attention by the rule above. Not counted
because they are no products: norms, activations, softmax, DoRA's row lengths themselves, an adapter's Fourier function.

PaLM (arXiv 2204.02311, appendix B) counts the full l*l instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.cost import traffic
from powertrain.cost.optimizer import moved_bytes, update_flops
from powertrain.cost.traffic import Recomputed, recomputed_of
from powertrain.cost.weights import (
    Linear,
    adapter_dropout,
    backward_of,
    has_frozen_base,
    linears,
)
from powertrain.records import ADAMW, ModelFacts, OptimizerFacts

BACKWARD_SHARE = 2                           # backward over forward: two products for each one of the forward pass


@dataclass(frozen=True)
class Work:
    """The work of one optimizer step, or of one evaluation pass."""

    dtype: str                               # of the matrix products: "fp32", "bf16", ...
    tokens: int                              # not padding
    flops: float                             # model FLOPs: what the mathematics needs
    recompute_flops: float                   # on top: what activation checkpointing computes a second time
    gemm_bytes: float                        # operands and results of the matrix products, each moved once a product
    elementwise_bytes: float                 # everything between the products, as eager PyTorch moves it
    optimizer_bytes: float                   # clipping and the update
    operators: int                           # kernels or operator calls, as eager PyTorch starts them
    dropout_elements: float                  # random numbers drawn
    padding_flops: float = 0.0               # on top: what is computed for slots that are padding
    update_flops: float = 0.0                # on top: matrix products of the optimizer

    @property
    def hardware_flops(self) -> float:
        """Return what the machine computes: the model's FLOPs, the recomputed ones, those of padding and of the update."""
        return self.flops + self.recompute_flops + self.padding_flops + self.update_flops

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.tokens


def mean_keys(lengths: Sequence[int], window: int | None = None, *, causal: bool = True) -> float:
    """Keys that a query sees on average, over documents of these lengths: sum of l(l+1) / 2T, at most `window` each.

    Where attention is not causal each query sees its whole document: sum of l * l / T.
    """
    pairs = 0
    for length in lengths:
        beyond = max(0, length - window) if window is not None else 0
        within = length - beyond
        pairs += within * (within + 1) // 2 + beyond * within if causal else length * length
    return pairs / sum(lengths)


def forward_flops(model: ModelFacts, lengths: Sequence[int], head_share: float = 1.0) -> float:
    """FLOPs of one forward pass over documents of these lengths, with the head on `head_share` of the tokens."""
    return _forward_flops(model, lengths, head_share, training=False)


def training_flops(model: ModelFacts, lengths: Sequence[int], head_share: float = 1.0, *, passes: int = 1) -> float:
    """FLOPs of forward and backward, in so many passes. Recomputation is not in it."""
    forward = _forward_flops(model, lengths, head_share, training=True) + (passes - 1) * _dora_flops(model)
    if not has_frozen_base(model):
        return (1 + BACKWARD_SHARE) * forward
    return forward + sum(lengths) * _frozen_backward_flops_per_token(model, lengths, head_share)


def recomputed_flops(model: ModelFacts, lengths: Sequence[int], every: int, *, dtype: str = "fp32",
                     keeps_attention: bool = False, passes: int = 1) -> float:
    """FLOPs that checkpointing adds: the forward pass of every `every`-th block once more, up to the last thing needed."""
    total = 0.0
    for again in recomputed_of(model, every, dtype):
        per_token = sum(_linear_flops(model, linear, again) for linear in linears(model))
        total += sum(lengths) * (per_token + (0.0 if keeps_attention else _attention_flops_per_token(model, lengths)))
        total += passes * _dora_flops(model) / len(model.adapted_layers) if again.adapted else 0.0
    return total


def step_work(model: ModelFacts, micro_batches: Sequence[Sequence[int]], dtype: str, *, checkpoint_every: int = 0,
              checkpoint_keeps_attention: bool = False, head_share: float = 1.0,
              optimizer: OptimizerFacts = ADAMW) -> Work:
    """The work of one optimizer step.

    `micro_batches`: for each forward pass of the step the lengths of its documents. Weights move once per micro-batch,
    the optimizer runs once per step.
    """
    lengths = [length for batch in micro_batches for length in batch]
    tokens, passes = sum(lengths), len(micro_batches)
    moved = traffic.Traffic(model, tokens, passes, dtype, checkpoint_every, head_share)
    return Work(
        dtype=dtype, tokens=tokens,
        flops=training_flops(model, lengths, head_share, passes=passes),
        recompute_flops=recomputed_flops(model, lengths, checkpoint_every, dtype=dtype, passes=passes,
                                         keeps_attention=checkpoint_keeps_attention),
        gemm_bytes=moved.gemm_bytes(), elementwise_bytes=moved.elementwise_bytes(),
        optimizer_bytes=moved_bytes(model, optimizer), operators=moved.operators(),
        dropout_elements=_dropout_elements(model, lengths), update_flops=update_flops(model, optimizer),
    )


# ------------------------------------------------------------------------------------------------ forward


def _forward_flops(model: ModelFacts, lengths: Sequence[int], head_share: float, *, training: bool) -> float:
    """Of one pass. With `training`, dropout is on."""
    linear = 2.0 * (model.matmul_parameters + head_share * model.head_parameters + _adapter_weights(model))
    if training and adapter_dropout(model) and has_dora(model):
        linear += 2.0 * len(model.adapted_layers) * sum(_second_input_weights(part) for part in linears(model))
    attention = model.layers * _attention_flops_per_token(model, lengths)
    return sum(lengths) * (linear + attention) + _dora_flops(model)


def _attention_flops_per_token(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Of one block, forward."""
    keys = mean_keys(lengths, model.window, causal=model.task != "span")
    return 4.0 * keys * model.heads * model.head_width


def _adapter_weights(model: ModelFacts) -> int:
    """In A and B of all adapters: what their products multiply by."""
    return len(model.adapted_layers) * sum(adapter.weights for linear in linears(model) for adapter in linear.adapters)


def has_dora(model: ModelFacts) -> bool:
    return any(name.endswith(".magnitude") for name in model.shapes)


def _dora_flops(model: ModelFacts) -> float:
    """Of one pass: BA of all adapters, whose rows' lengths are made without a gradient."""
    if not has_dora(model):
        return 0.0
    return 2.0 * len(model.adapted_layers) * sum(adapter.rank * adapter.inputs * adapter.outputs
                                                 for linear in linears(model) for adapter in linear.adapters)


def _second_input_weights(linear: Linear) -> int:
    """The rows of W that meet the dropped input too, in DoRA with dropout."""
    return sum(adapter.inputs * adapter.outputs for adapter in linear.adapters)


# ------------------------------------------------------------------------------------------------ backward


def _frozen_backward_flops_per_token(model: ModelFacts, lengths: Sequence[int], head_share: float) -> float:
    total = 2.0 * head_share * model.head_parameters
    attention = BACKWARD_SHARE * _attention_flops_per_token(model, lengths)
    again = has_dora(model) and adapter_dropout(model)
    for layer in range(model.layers):
        backward = backward_of(model, layer)
        total += attention if backward.attention else 0.0
        for linear in linears(model):
            needed = linear.name in backward.needed
            total += 2.0 * linear.weights if needed else 0.0
            if linear.name in backward.trained:  # gradients of B, of what B reads, of A, and of the input if it needs one
                total += sum(2.0 * adapter.rank * (2 * adapter.outputs + (2 if needed else 1) * adapter.inputs)
                             for adapter in linear.adapters)
                total += 2.0 * _second_input_weights(linear) if again and needed else 0.0
    return total


def _linear_flops(model: ModelFacts, linear: Linear, again: Recomputed) -> float:
    """Per token, of what is made again of a linear and of its adapters."""
    total = 0.0 if linear.name in again.left_out else 2.0 * linear.weights
    if not again.adapted:
        return total
    total += sum(2.0 * adapter.weights for adapter in linear.adapters)
    if linear.name in again.left_out and again.leaves_out_up:
        total -= sum(2.0 * adapter.rank * adapter.outputs for adapter in linear.adapters)
    if has_dora(model) and adapter_dropout(model):
        total += 2.0 * _second_input_weights(linear)
    return total


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
