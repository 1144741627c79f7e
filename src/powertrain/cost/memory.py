"""Peak memory of a training step, by component, from the model's shape and the workload.

Trained weights, their gradients and AdamW's two moments are fp32: 16 bytes per weight. Frozen weights have neither, and
stay as they are stored (stored.py). Under autocast each trained matrix is also held once in the product type; a frozen
one that is stored otherwise exists in it during one product only. What the forward pass saves for the backward pass is
listed term by term in activations.py.

Memory is fullest at one of three moments: when the loss is differentiated (all activations and several copies of the
logits), when the last block is (all activations and that block's gradients), or when the first one is (few
activations and the gradients of all weights). `peak_memory` counts each and gives the largest. Not counted: the
process itself (about 0.3 GB with torch loaded, more with CUDA), the data, and the allocator's rounding.

Legend: T tokens of a micro-batch, V vocabulary, d width, f MLP width, L document length, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping

from powertrain.cost.activations import saved_by_block_bytes, saved_bytes, tokens_of
from powertrain.cost.gradients import checkpointed_layers, has_frozen_base, linears, lowest_layer
from powertrain.cost.stored import DTYPE_BYTES, FP32, as_held, frozen_bytes, matrix_bytes, other_bytes
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts

LOSS_COPIES = 3                              # fp32 (T, V) at once: log-probabilities, their gradient, the logits'
CHUNK_COPIES = 2                             # fp32 (rows, V) at once: logits, and the exponentials of the normaliser
SCORE_GRADIENTS = 3                          # fp32 (H, L, L) at once: of the weights, the scores, the masked scores


def peak_memory(model: ModelFacts, workload: Workload) -> Mapping[str, int]:
    """Component -> bytes at the fullest moment of a step after the first (the optimizer's state exists by then).

    A share of what it counts is an upper bound: RMS norm on a GPU saves one tensor fewer than it does on a CPU. For a
    model that another library computes it is what the decoder here would take, at that shape.
    """
    model = as_held(model, workload.base_dtype)
    moments = (at_the_loss(model, workload), at_the_last_block(model, workload), at_the_first_block(model, workload))
    return max(moments, key=lambda moment: sum(moment.values()))


def at_the_loss(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """While the loss is computed and differentiated."""
    tokens, rows = tokens_of(workload), workload.loss_chunk_rows
    if rows is None:
        loss = LOSS_COPIES * FP32 * tokens * model.vocabulary
    else:
        chunk = CHUNK_COPIES * FP32 * min(rows, round(workload.head_share * tokens)) * model.vocabulary
        loss = chunk + _kept_by_chunked_loss(model, tokens)
    return _standing(model, workload) | {
        "low-precision copies": _copies(model, workload, model.layers, head=True),
        "gradients": _gradients_before(model, workload), "activations": saved_bytes(model, workload), "loss": loss,
    }


def at_the_last_block(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """While the last block is differentiated, with the head's gradient made and all activations still held.

    Where the last block keeps its activations and an earlier one does not, those of the last are gone by the time the
    earlier one is computed again; so only a last block that is computed again adds to what is held.
    """
    every, last = workload.checkpoint_every, model.layers - 1
    again = saved_by_block_bytes(model, workload, last) if every and last % every == 0 else 0
    held = model.layers - checkpointed_layers(model, every) + (1 if again else 0)
    return _standing(model, workload) | {
        "low-precision copies": _copies(model, workload, held, head=False),
        "gradients": max(_gradients_before(model, workload), _head_gradient(model)),
        "activations": saved_bytes(model, workload) + again, "workspace": _block_gradients(model, workload),
    }


def at_the_first_block(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """While the first block with a backward pass and the embedding are differentiated, and all other gradients are made."""
    # the table's gradient is made whole, then added to what is there: of the tied head, or of earlier micro-batches
    adds_table = model.tied_head or workload.micro_batches > 1
    table = _head_gradient(model) if adds_table else 0
    return _standing(model, workload) | {
        "low-precision copies": _copies(model, workload, 1, head=False),
        "gradients": FP32 * model.trainable, "activations": saved_by_block_bytes(model, workload, lowest_layer(model)),
        "workspace": max(_block_gradients(model, workload), table),
    }


# ------------------------------------------------------------------------------------------------ weights


def _standing(model: ModelFacts, workload: Workload) -> dict[str, int]:
    """What is there at every moment: the weights and the optimizer's state."""
    weights = FP32 * model.trainable + frozen_bytes(model)
    return {"weights": weights, "optimizer": round(workload.moment_bytes * model.trainable)}


def _copies(model: ModelFacts, workload: Workload, layers: int, *, head: bool) -> int:
    """Copies of matrices in the product type: of `layers` blocks, and of the head.

    Of trained ones autocast's forward pass makes them all; then only what is saved for the backward pass holds them. Of
    frozen ones there is the head's, or at a time that of one linear; and those of the adapters.
    """
    item = DTYPE_BYTES[workload.dtype]
    if not has_frozen_base(model):
        matrices = model.matmul_parameters * layers // model.layers + (model.head_parameters if head else 0)
        return item * matrices if item < FP32 else 0
    adapters = item * model.adapter_parameters * layers // model.layers if item < FP32 else 0
    if head:
        return adapters + (item * model.head_parameters if other_bytes(model) != item else 0)
    return adapters + (item * max(linear.weights for linear in linears(model)) if matrix_bytes(model) != item else 0)


def _gradients_before(model: ModelFacts, workload: Workload) -> int:
    """Gradients that a micro-batch finds: none in the first one (zero_grad drops them), all in the others."""
    return FP32 * model.trainable if workload.micro_batches > 1 else 0


def _head_gradient(model: ModelFacts) -> int:
    """Of the head's weight, or of the embedding's, which has the same shape."""
    return 0 if has_frozen_base(model) else FP32 * model.head_parameters


def _kept_by_chunked_loss(model: ModelFacts, tokens: int) -> int:
    """The gradients of the hidden rows and of the head, which are made in the forward pass."""
    return FP32 * tokens * model.width + _head_gradient(model)


# ------------------------------------------------------------------------------------------------ workspace


def _block_gradients(model: ModelFacts, workload: Workload) -> int:
    """What differentiating one block holds at once: gradients in the MLP, or of the attention weights."""
    tokens, item = tokens_of(workload), DTYPE_BYTES[workload.dtype]
    mlp = tokens * (item * (3 if model.gated_mlp else 2) * model.mlp_width + 2 * FP32 * model.width)
    scores = SCORE_GRADIENTS * FP32 * tokens * workload.block * model.heads if workload.attention_saves_scores else 0
    return max(mlp, scores)
