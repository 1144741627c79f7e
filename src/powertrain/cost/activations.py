"""What a forward pass keeps for the backward pass, term by term, as the decoder in eager PyTorch keeps it.

Checked against torch's saved tensors by a test. A linear that is trained, or has adapters, keeps its input; a frozen one
keeps nothing. A frozen norm keeps what it reads, and not what its weight multiplies. See gradients.py for which blocks
have a backward pass at all.

Legend: T tokens of a micro-batch, d width, q and k widths of queries and keys, f MLP width, L document length, H heads,
r rank of an adapter.
"""

from __future__ import annotations

from powertrain.cost.gradients import (
    ADAPTER,
    Backward,
    adapter_dropout,
    backward_of,
    checkpointed_layers,
    has_frozen_base,
    linears,
    lowest_layer,
)
from powertrain.cost.stored import DTYPE_BYTES, FP32
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts

INDEX_BYTES = 8                              # int64
FOURIER_COPIES = 6                           # fp32 (T, r) of an LS-LoRA adapter: each step of its function keeps one


def tokens_of(workload: Workload) -> int:
    """T."""
    return min(workload.micro_batch_tokens, workload.tokens)


def saved_bytes(model: ModelFacts, workload: Workload) -> int:
    """All that a forward pass leaves for the backward pass, before the loss: blocks and what is around them.

    A block that is computed again leaves its fp32 input.
    """
    recomputed = checkpointed_layers(model, workload.checkpoint_every)
    every = workload.checkpoint_every
    kept = sum(saved_by_block_bytes(model, workload, layer) for layer in range(lowest_layer(model), model.layers)
               if not every or layer % every)
    inputs = recomputed * FP32 * tokens_of(workload) * model.width
    return kept + inputs + saved_outside_bytes(model, workload)


def saved_by_block_bytes(model: ModelFacts, workload: Workload, layer: int) -> int:
    """What block `layer` saves: its two norms, attention, the MLP, its adapters, the masks of dropout on its branches."""
    backward = backward_of(model, layer)
    item = DTYPE_BYTES[workload.dtype]
    per_token = _mlp_bytes(model, workload, backward) + _adapter_bytes(model, workload, backward)
    per_token += _norm_bytes(model) * (backward.block + backward.middle)
    per_token += item * model.width * len(backward.kept & {"qkv", "mlp_in"})
    if model.dropout:
        per_token += item * model.width * (backward.middle + backward.any)
    return tokens_of(workload) * per_token + _attention_bytes(model, workload, backward)


def saved_outside_bytes(model: ModelFacts, workload: Workload) -> int:
    """The last norm; tokens, positions and targets; the rotation's cosines and sines, which all blocks share."""
    per_token = _norm_bytes(model) + 3 * INDEX_BYTES
    if rotates(model):
        per_token += 2 * FP32 * model.head_width
    if not has_frozen_base(model):
        per_token += DTYPE_BYTES[workload.dtype] * model.width
        per_token += FP32 * model.width if model.dropout else 0
    return tokens_of(workload) * per_token


def _norm_bytes(model: ModelFacts) -> int:
    """Per token: the fp32 residual it reads, and its statistics; its output is what a linear saves.

    RMS norm is made of several operators on a CPU and saves the normalised residual too, for its weight's gradient.
    """
    normalised = 0 if layer_norm(model) or has_frozen_base(model) else FP32 * model.width
    return FP32 * (model.width + 2) + normalised


def _mlp_bytes(model: ModelFacts, workload: Workload, backward: Backward) -> int:
    """Per token: the activation's input and output, f each; gated, 2f of input, the activated gate, the product.

    The last of them is what the second linear saves.
    """
    copies = (3 if model.gated_mlp else 1) * backward.mlp + ("mlp_out" in backward.kept)
    return DTYPE_BYTES[workload.dtype] * copies * model.mlp_width


def _adapter_bytes(model: ModelFacts, workload: Workload, backward: Backward) -> int:
    """Per token: what B reads. With a function between A and B also its steps; with DoRA the row lengths' two factors.

    With dropout A reads an input of its own, and there is its mask if that input needs a gradient.
    """
    if not has_frozen_base(model):
        return 0
    item = DTYPE_BYTES[workload.dtype]
    weights = {match.group(3) for name in model.shapes if (match := ADAPTER.fullmatch(name))}
    total = 0
    for linear in (linear for linear in linears(model) if linear.name in backward.trained):
        dropped = (1 + (linear.name in backward.needed)) if adapter_dropout(model) else 0
        for adapter in linear.adapters:
            total += item * (adapter.rank + dropped * adapter.inputs)
            total += FOURIER_COPIES * FP32 * adapter.rank if "log_sigma" in weights else 0
            total += 2 * item * adapter.outputs if "magnitude" in weights else 0
    return total


def _attention_bytes(model: ModelFacts, workload: Workload, backward: Backward) -> int:
    """Its output, which the output projection saves, what its kernel saves, and what QK-norm reads and makes."""
    tokens, item = tokens_of(workload), DTYPE_BYTES[workload.dtype]
    queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    output = tokens * item * queries
    saved = output if "attention_out" in backward.kept else 0
    if not backward.attention:
        return saved
    normed = norms_queries(model)
    if normed:                                   # of what it reads: an fp32 copy, or the projection itself; its weight's factor
        copies = (item != FP32) + (not has_frozen_base(model))
        saved += tokens * FP32 * (copies * (queries + keys) + model.heads + model.kv_heads)
    projection = tokens * item * (queries + 2 * keys)
    if workload.attention_saves_scores:
        return saved + _scores_bytes(model, workload) + (projection if normed and item == FP32 else 0)
    rotated = tokens * item * (queries + keys) if rotates(model) else 0
    return max(saved, output) + projection + rotated + tokens * FP32 * model.heads   # the last: a softmax sum per head


def _scores_bytes(model: ModelFacts, workload: Workload) -> int:
    """Plain attention in fp32: copies of q, k and v at query width, the weights of all pairs, and the causal mask.

    With dropout the weights are held three times: before it, its mask, and after it.
    """
    tokens, length = tokens_of(workload), workload.block
    weights = tokens * length * model.heads * (3 if model.dropout else 1)
    return FP32 * (3 * tokens * model.heads * model.head_width + weights) + length * length


# ------------------------------------------------------------------------------------------------ read off the shapes


def rotates(model: ModelFacts) -> bool:
    return "position_embedding.weight" not in model.shapes


def norms_queries(model: ModelFacts) -> bool:
    return "blocks.0.q_norm.weight" in model.shapes


def layer_norm(model: ModelFacts) -> bool:
    """Layer norm, not RMS norm: it has a bias, or the model is the one family with learned positions (gpt2)."""
    return "blocks.0.attention_norm.bias" in model.shapes or not rotates(model)
