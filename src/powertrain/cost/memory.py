"""Peak memory of a training step, by component, from the model's shape and the workload.

Master weights, their gradients and AdamW's two moments are fp32: 16 bytes per weight. Under autocast each matrix is
also held once in the product type. What the forward pass saves for the backward pass is listed term by term in
`saved_by_block_bytes`, as the decoder in eager PyTorch saves it (checked against torch's saved tensors by a test).

Memory is fullest at one of three moments: when the loss is differentiated (all activations and several copies of the
logits), when the last block is (all activations and that block's gradients), or when the first one is (few
activations and the gradients of all weights). `peak_memory` counts each and gives the largest. Not counted: the
process itself (about 0.3 GB with torch loaded, more with CUDA), the data, and the allocator's rounding.

Legend: T tokens of a micro-batch, V vocabulary, d width, q and k widths of queries and keys, f MLP width, L document
length, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from powertrain.cost.work import DTYPE_BYTES, checkpointed_layers
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts

FP32 = 4
ADAMW_MOMENTS = 2
LOSS_COPIES = 3                              # fp32 (T, V) at once: log-probabilities, their gradient, the logits'
CHUNK_COPIES = 2                             # fp32 (rows, V) at once: logits, and the exponentials of the normaliser
SCORE_GRADIENTS = 3                          # fp32 (H, L, L) at once: of the weights, the scores, the masked scores
INDEX_BYTES = 8                              # int64


def peak_memory(model: ModelFacts, workload: Workload) -> Mapping[str, int]:
    """Component -> bytes at the fullest moment of a step after the first (the optimizer's state exists by then).

    A share of what it counts is an upper bound: RMS norm on a GPU saves one tensor fewer than it does on a CPU.
    """
    moments = (at_the_loss(model, workload), at_the_last_block(model, workload), at_the_first_block(model, workload))
    return max(moments, key=lambda moment: sum(moment.values()))


def at_the_loss(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """While the loss is computed and differentiated."""
    tokens, rows = _tokens(workload), workload.loss_chunk_rows
    if rows is None:
        loss = LOSS_COPIES * FP32 * tokens * model.vocabulary
    else:
        chunk = CHUNK_COPIES * FP32 * min(rows, tokens) * model.vocabulary
        loss = chunk + _kept_by_chunked_loss(model, tokens)
    return _standing(model) | {
        "low-precision copies": _copies(model, workload, model.layers, head=True),
        "gradients": _gradients_before(model, workload), "activations": saved_bytes(model, workload), "loss": loss,
    }


def at_the_last_block(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """While the last block is differentiated, with the head's gradient made and all activations still held.

    Where the last block keeps its activations and an earlier one does not, those of the last are gone by the time the
    earlier one is computed again; so only a last block that is computed again adds to what is held.
    """
    every = workload.checkpoint_every
    again = saved_by_block_bytes(model, workload) if every and (model.layers - 1) % every == 0 else 0
    held = model.layers - _recomputed_layers(model, workload) + (1 if again else 0)
    return _standing(model) | {
        "low-precision copies": _copies(model, workload, held, head=False),
        "gradients": max(_gradients_before(model, workload), FP32 * model.head_parameters),
        "activations": saved_bytes(model, workload) + again, "workspace": _block_gradients(model, workload),
    }


def at_the_first_block(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """While the first block and the embedding are differentiated, with the gradients of all other weights made."""
    # the table's gradient is made whole, then added to what is there: of the tied head, or of earlier micro-batches
    adds_table = model.tied_head or workload.micro_batches > 1
    table = FP32 * model.head_parameters if adds_table else 0
    return _standing(model) | {
        "low-precision copies": _copies(model, workload, 1, head=False),
        "gradients": FP32 * model.trainable, "activations": saved_by_block_bytes(model, workload),
        "workspace": max(_block_gradients(model, workload), table),
    }


# ------------------------------------------------------------------------------------------------ weights


def _standing(model: ModelFacts) -> dict[str, int]:
    """What is there at every moment: the fp32 weights and the optimizer's state."""
    return {"weights": FP32 * model.parameters, "optimizer": ADAMW_MOMENTS * FP32 * model.trainable}


def _copies(model: ModelFacts, workload: Workload, layers: int, *, head: bool) -> int:
    """Autocast's copies of the matrices of `layers` blocks, and of the head's, in the product type.

    The forward pass makes them all; then only what is saved for the backward pass holds them.
    """
    item = DTYPE_BYTES[workload.dtype]
    matrices = model.matmul_parameters * layers // model.layers + (model.head_parameters if head else 0)
    return item * matrices if item < FP32 else 0


def _gradients_before(model: ModelFacts, workload: Workload) -> int:
    """Gradients that a micro-batch finds: none in the first one (zero_grad drops them), all in the others."""
    return FP32 * model.trainable if workload.micro_batches > 1 else 0


def _kept_by_chunked_loss(model: ModelFacts, tokens: int) -> int:
    """The gradients of the hidden rows and of the head, which are made in the forward pass."""
    return FP32 * (tokens * model.width + model.head_parameters)


# ------------------------------------------------------------------------------------------------ activations


def _tokens(workload: Workload) -> int:
    return min(workload.micro_batch_tokens, workload.tokens)


def _recomputed_layers(model: ModelFacts, workload: Workload) -> int:
    return checkpointed_layers(model, workload.checkpoint_every)


def saved_bytes(model: ModelFacts, workload: Workload) -> int:
    """All that a forward pass leaves for the backward pass, before the loss: blocks and what is around them.

    A block that is computed again leaves its fp32 input.
    """
    recomputed = _recomputed_layers(model, workload)
    kept = (model.layers - recomputed) * saved_by_block_bytes(model, workload)
    inputs = recomputed * FP32 * _tokens(workload) * model.width
    return kept + inputs + saved_outside_bytes(model, workload)


def saved_by_block_bytes(model: ModelFacts, workload: Workload) -> int:
    """What one block saves: its two norms, attention, the MLP, and the masks of dropout on its two branches."""
    per_token = 2 * _norm_bytes(model, workload) + _mlp_bytes(model, workload)
    if model.dropout:
        per_token += 2 * DTYPE_BYTES[workload.dtype] * model.width
    return _tokens(workload) * per_token + _attention_bytes(model, workload)


def saved_outside_bytes(model: ModelFacts, workload: Workload) -> int:
    """The last norm; tokens, positions and targets; the rotation's cosines and sines, which all blocks share."""
    per_token = _norm_bytes(model, workload) + 3 * INDEX_BYTES
    if _rotates(model):
        per_token += 2 * FP32 * model.head_width
    if model.dropout:
        per_token += FP32 * model.width
    return _tokens(workload) * per_token


def _norm_bytes(model: ModelFacts, workload: Workload) -> int:
    """Per token: the fp32 residual it reads, its statistics, and its output in the product type, which a linear saves.

    RMS norm is made of several operators on a CPU and saves the normalised residual too.
    """
    read = FP32 * (model.width + 2)
    normalised = 0 if _layer_norm(model) else FP32 * model.width
    return read + normalised + DTYPE_BYTES[workload.dtype] * model.width


def _mlp_bytes(model: ModelFacts, workload: Workload) -> int:
    """Per token: the activation's input and output, f each; gated, 2f of input, the activated gate, the product."""
    return DTYPE_BYTES[workload.dtype] * (4 if model.gated_mlp else 2) * model.mlp_width


def _attention_bytes(model: ModelFacts, workload: Workload) -> int:
    """Its output, which the output projection saves, what its kernel saves, and what QK-norm reads and makes."""
    tokens, item = _tokens(workload), DTYPE_BYTES[workload.dtype]
    queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    saved = tokens * item * queries
    normed = _norms_queries(model)
    if normed:
        copies = 1 if item == FP32 else 2                    # of what it reads: an fp32 copy, or the projection itself
        saved += tokens * FP32 * (copies * (queries + keys) + model.heads + model.kv_heads)
    projection = tokens * item * (queries + 2 * keys)
    if workload.attention_saves_scores:
        return saved + _scores_bytes(model, workload) + (projection if normed and item == FP32 else 0)
    rotated = tokens * item * (queries + keys) if _rotates(model) else 0
    return saved + projection + rotated + tokens * FP32 * model.heads            # the last: a softmax sum per head


def _scores_bytes(model: ModelFacts, workload: Workload) -> int:
    """Plain attention in fp32: copies of q, k and v at query width, the weights of all pairs, and the causal mask.

    With dropout the weights are held three times: before it, its mask, and after it.
    """
    tokens, length = _tokens(workload), workload.block
    weights = tokens * length * model.heads * (3 if model.dropout else 1)
    return FP32 * (3 * tokens * model.heads * model.head_width + weights) + length * length


def _block_gradients(model: ModelFacts, workload: Workload) -> int:
    """What differentiating one block holds at once: gradients in the MLP, or of the attention weights."""
    tokens, item = _tokens(workload), DTYPE_BYTES[workload.dtype]
    mlp = tokens * (item * (3 if model.gated_mlp else 2) * model.mlp_width + 2 * FP32 * model.width)
    scores = SCORE_GRADIENTS * FP32 * tokens * workload.block * model.heads if workload.attention_saves_scores else 0
    return max(mlp, scores)


# ------------------------------------------------------------------------------------------------ read off the shapes


def _rotates(model: ModelFacts) -> bool:
    return "position_embedding.weight" not in model.shapes


def _norms_queries(model: ModelFacts) -> bool:
    return "blocks.0.q_norm.weight" in model.shapes


def _layer_norm(model: ModelFacts) -> bool:
    """Layer norm, not RMS norm: it has a bias, or the model is the one family with learned positions (gpt2)."""
    return "blocks.0.attention_norm.bias" in model.shapes or not _rotates(model)
