"""The work of one optimizer step, counted from the model's shape: FLOPs, bytes that move, operator calls, random numbers.

FLOPs. A multiplication and an addition are two. A linear of k inputs and n outputs costs 2kn a token forward and 4kn backward:
the gradients of its input and of its weight. A query that sees s keys costs 4*s*d_q forward (scores and the weighted sum,
d_q = heads x head width) and 8*s*d_q backward. Causality is counted exactly: a document of l tokens has l(l+1)/2 pairs of query
and key, and tokens see nothing of other documents. What a kernel computes beyond that (masked halves of tiles, scores made
again in the backward pass) is not counted. Looking up an embedding is no multiplication; the head is one, tied or not.
Per token, with P weights in the blocks' linears and H in the head, and s = sum of l(l+1) / 2T:

    forward  2(P + H) + 4 L s d_q        training  three times that

With adapters (A weights) on frozen weights, the backward pass makes no gradient of a frozen weight, and none of anything
below the lowest adapter: 2P' + 2H + 8 L' s d_q, where P' and L' count what has a backward pass, and 4A for the adapters, less
2rk where the input of an A needs no gradient. A loss in chunks leaves rows without a target out of the head, so H counts by
their share. DoRA makes the lengths of the rows of W + BA once a pass, 2rkn; with dropout its W meets a second input, 2kn, and
2kn backward where that input needs a gradient. All adapted blocks count as having the adapters of the first of them.
Checked against torch's FlopCounterMode: equal for every family and method. Norms, activations, softmax, DoRA's row lengths
themselves and an adapter's Fourier function are no products and not counted. PaLM (arXiv 2204.02311, appendix B) counts l*l.

Recomputing. Autograd's non-reentrant checkpoint recomputes a block up to the last tensor that a gradient needs. Without
dropout that is the input of the down projection, whose product is not computed again; with DoRA on the down projection (and
no dropout, which gives DoRA a product of its own) the product is needed for the gradient of the magnitudes. Where a frozen
matrix is converted for each product, that last tensor is the input of the adapter's B, so the product of B is left out.

Bytes. Every product moves its two operands and its result once. Between products the count follows what eager PyTorch runs,
operator by operator; caches make a CPU move less of it, and fusion less still.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from powertrain.cost import weights
from powertrain.cost.weights import Adapter, Linear, has_frozen_base, linears
from powertrain.records import ADAMW, ModelFacts, OptimizerFacts
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT, FOUR_BIT, FP32

LAST = "mlp_out"
PRODUCTS = {"inner": "mlp_in", "heads": "qkv"}               # saved tensor of a fused block -> the linear that computes it
BACKWARD_SHARE = 2                           # backward over forward: two products for each one of the forward pass
DORA_PASSES = 5                              # fp32 of W's size: BA written, W and BA read, the sum written and read

FORWARD_OPERATORS = 20                       # of one block in eager PyTorch: 4 linears, 2 norms, rotation, attention
HEAD_OPERATORS = 8                           # embedding, last norm, head, loss
CAST_OPERATORS = 4                           # of one block under autocast: one per weight
ADAPTER_OPERATORS = 5                        # of one adapter: A, scale, B, addition, and its part of the output
OPTIMIZER_OPERATORS = 2                      # per weight, several tensors a kernel or one after another


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


def step_work(model: ModelFacts, micro_batches: Sequence[Sequence[int]], dtype: str, *, checkpoint_every: int = 0,
              checkpoint_keeps_attention: bool = False, head_share: float = 1.0,
              optimizer: OptimizerFacts = ADAMW) -> Work:
    """Return the work of one optimizer step.

    `micro_batches`: for each forward pass of the step the lengths of its documents. Weights move once per micro-batch,
    the optimizer runs once per step.
    """
    lengths = [length for batch in micro_batches for length in batch]
    tokens, passes = sum(lengths), len(micro_batches)
    moved = Traffic(model, tokens, passes, dtype, checkpoint_every, head_share)
    return Work(
        dtype=dtype, tokens=tokens,
        flops=training_flops(model, lengths, head_share, passes=passes),
        recompute_flops=recomputed_flops(model, lengths, checkpoint_every, dtype=dtype, passes=passes,
                                         keeps_attention=checkpoint_keeps_attention),
        gemm_bytes=moved.gemm_bytes(), elementwise_bytes=moved.elementwise_bytes(),
        optimizer_bytes=FP32 * weights.CLIP_PASSES * model.trainable + weights.update_bytes(model, optimizer),
        operators=moved.operators(), dropout_elements=_dropout_elements(model, lengths),
        update_flops=weights.update_flops(model, optimizer),
    )


# ------------------------------------------------------------------------------------------------ FLOPs


def mean_keys(lengths: Sequence[int], window: int | None = None, *, causal: bool = True) -> float:
    """Return how many keys a query sees on average, over documents of these lengths: sum of l(l+1) / 2T, at most `window` each.

    Where attention is not causal each query sees its whole document: sum of l * l / T.
    """
    pairs = 0
    for length in lengths:
        beyond = max(0, length - window) if window is not None else 0
        within = length - beyond
        pairs += within * (within + 1) // 2 + beyond * within if causal else length * length
    return pairs / sum(lengths)


def forward_flops(model: ModelFacts, lengths: Sequence[int], head_share: float = 1.0, *, training: bool = False) -> float:
    """Return the FLOPs of one forward pass, with the head on `head_share` of the tokens. With `training`, dropout is on."""
    linear = 2.0 * (model.matmul_parameters + head_share * model.head_parameters
                    + len(model.adapted_layers) * sum(adapter.weights for adapter in _adapters(model)))
    if training and model.adapter_dropout and has_dora(model):
        linear += 2.0 * len(model.adapted_layers) * sum(_second_input_weights(part) for part in linears(model))
    attention = model.layers * _attention_flops_per_token(model, lengths)
    return sum(lengths) * (linear + attention) + _dora_flops(model)


def training_flops(model: ModelFacts, lengths: Sequence[int], head_share: float = 1.0, *, passes: int = 1) -> float:
    """Return the FLOPs of forward and backward, in so many passes, without recomputation."""
    forward = forward_flops(model, lengths, head_share, training=True) + (passes - 1) * _dora_flops(model)
    if not has_frozen_base(model):
        return (1 + BACKWARD_SHARE) * forward - sum(lengths) * _spared_flops(model, lengths, head_share)
    per_token = 2.0 * head_share * model.head_parameters
    attention = BACKWARD_SHARE * _attention_flops_per_token(model, lengths)
    has_second_input = has_dora(model) and model.adapter_dropout
    for layer in range(model.layers):
        backward = weights.backward_of(model, layer)
        per_token += attention if backward.attention else 0.0
        for linear in linears(model):
            needed = linear.name in backward.needed
            per_token += 2.0 * linear.weights if needed else 0.0
            if linear.name in backward.trained:  # gradients of B, of what B reads, of A, and of the input if it needs one
                per_token += sum(2.0 * adapter.rank * (2 * adapter.outputs + (2 if needed else 1) * adapter.inputs)
                                 for adapter in linear.adapters)
                per_token += 2.0 * _second_input_weights(linear) if has_second_input and needed else 0.0
    return forward + sum(lengths) * per_token


def _spared_flops(model: ModelFacts, lengths: Sequence[int], head_share: float) -> float:
    """Return the FLOPs a token that the backward pass does not take, because the recipe freezes weights."""
    if not model.frozen:
        return 0.0
    head = "embedding.weight" if model.tied_head else "head.weight"
    spared = 2.0 * head_share * model.head_parameters * (head in model.frozen)
    for layer in range(model.layers):
        backward = weights.backward_of(model, layer)
        spared += sum(2.0 * linear.weights * ((linear.name not in backward.trained) + (linear.name not in backward.needed))
                      for linear in linears(model))
        spared += 0.0 if backward.attention else BACKWARD_SHARE * _attention_flops_per_token(model, lengths)
    return spared


def recomputed_flops(model: ModelFacts, lengths: Sequence[int], every: int, *, dtype: str = "fp32",
                     keeps_attention: bool = False, passes: int = 1) -> float:
    """Return the FLOPs that checkpointing every `every`-th block adds: its forward pass up to the last tensor needed."""
    total = 0.0
    for again in recomputed_of(model, every, dtype):
        per_token = sum(_linear_flops(model, linear, again) for linear in linears(model))
        total += sum(lengths) * (per_token + (0.0 if keeps_attention else _attention_flops_per_token(model, lengths)))
        total += passes * _dora_flops(model) / len(model.adapted_layers) if again.adapted else 0.0
    return total


def recompute_flops(model: ModelFacts, tokens: int, saved: Mapping[str, str], blocks: int) -> float:
    """Return the FLOPs of the products that fused blocks do not keep (models/kernels/fused/saving.py) and compute again."""
    names = {PRODUCTS[kind] for kind, action in saved.items() if action == "recompute"}
    blocks = min(blocks, model.layers - weights.lowest_layer(model))
    return 2.0 * blocks * tokens * sum(linear.weights for linear in linears(model) if linear.name in names)


def _attention_flops_per_token(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Return the FLOPs of the attention of one block, forward."""
    keys = mean_keys(lengths, model.window, causal=model.task != "span")
    return 4.0 * keys * model.heads * model.head_width


def _adapters(model: ModelFacts) -> list[Adapter]:
    """Return all adapters of one block that has some."""
    return [adapter for linear in linears(model) for adapter in linear.adapters]


def has_dora(model: ModelFacts, linear: str = "") -> bool:
    """Return whether there are DoRA adapters, or some on this linear."""
    return any(name.endswith(".magnitude") and f".{linear}" in name for name in model.shapes)


def _dora_flops(model: ModelFacts) -> float:
    """Return the FLOPs of BA of all DoRA adapters in one pass, whose rows' lengths are made without a gradient."""
    if not has_dora(model):
        return 0.0
    return 2.0 * len(model.adapted_layers) * sum(a.rank * a.inputs * a.outputs for a in _adapters(model))


def _second_input_weights(linear: Linear) -> int:
    """Return the weights in the rows of W that meet the dropped input too, in DoRA with dropout."""
    return sum(adapter.inputs * adapter.outputs for adapter in linear.adapters)


def _linear_flops(model: ModelFacts, linear: Linear, again: "Recomputed") -> float:
    """Return the FLOPs a token of what is recomputed of a linear and of its adapters."""
    total = 0.0 if linear.name in again.left_out else 2.0 * linear.weights
    if not again.adapted:
        return total
    total += sum(2.0 * adapter.weights for adapter in linear.adapters)
    if linear.name in again.left_out and again.leaves_out_up:
        total -= sum(2.0 * adapter.rank * adapter.outputs for adapter in linear.adapters)
    if has_dora(model) and model.adapter_dropout:
        total += 2.0 * _second_input_weights(linear)
    return total


def _dropout_elements(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Return how many random numbers a forward pass draws.

    For the embedding, attention weights (l*l a head), two residual branches a block, and the inputs of adapters.
    """
    tokens, total = sum(lengths), 0
    if model.dropout:
        pairs = sum(length * length for length in lengths)
        total += tokens * model.width * (1 + 2 * model.layers) + model.layers * model.heads * pairs
    if model.adapter_dropout:
        total += tokens * sum(adapter.inputs for adapter in _adapters(model)) * len(model.adapted_layers)
    return float(total)


# ------------------------------------------------------------------------------------------------ recomputed blocks


@dataclass(frozen=True)
class Recomputed:
    """One block that is computed again."""

    layer: int
    adapted: bool                            # it has adapters
    left_out: frozenset[str]                 # linears whose product is not made again
    leaves_out_up: bool                      # nor the last product of their adapters


def recomputed_of(model: ModelFacts, every: int, dtype: str) -> tuple[Recomputed, ...]:
    """Return the blocks that are computed again when every `every`-th one keeps only its input; 0: none."""
    found = []
    for layer in range(0, model.layers, every) if every else ():
        adapted = has_frozen_base(model) and layer in model.adapted_layers
        with_magnitude = adapted and has_dora(model, f"{LAST}.")
        needs_product = with_magnitude and not model.adapter_dropout
        left_out = frozenset() if model.dropout or needs_product else frozenset({LAST})
        made_wide = has_frozen_base(model) and weights.matrix_bytes(model) != DTYPE_BYTES[dtype]
        last_has_adapters = adapted and any(linear.name == LAST and linear.adapters for linear in linears(model))
        found.append(Recomputed(layer, adapted, left_out,
                                bool(left_out) and made_wide and last_has_adapters and not with_magnitude))
    return tuple(block for block in found if block.layer >= weights.lowest_layer(model))


# ------------------------------------------------------------------------------------------------ bytes and calls


@dataclass(frozen=True)
class Traffic:
    """The bytes that `passes` forward passes of `tokens` slots in all move with their backward passes, and their operators."""

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

    def gemm_bytes(self) -> float:
        """Return the bytes of all products: forward, again where a block is recomputed, and backward.

        The backward pass of a trained linear moves the same three twice (dY, W -> dX and X, dY -> dW), that of a frozen
        one once, and only if something below needs its dX.
        """
        head_rounds = 2 if has_frozen_base(self.model) else 1 + BACKWARD_SHARE
        elements = self._product(self.head_share * self.tokens, self.model.width, self.model.classes) * head_rounds
        for linear, rounds, adapter_rounds in self._rounds():
            elements += rounds * self._product(self.tokens, linear.inputs, linear.outputs)
            elements += adapter_rounds * sum(
                self.tokens * (adapter.inputs + 2 * adapter.rank + adapter.outputs) + self.passes * adapter.weights
                for adapter in linear.adapters)
        return self.item * elements

    def _product(self, rows: float, inputs: int, outputs: int) -> float:
        """Return the elements that a product of (rows, inputs) and (inputs, outputs) moves, the matrix once a pass."""
        return rows * (inputs + outputs) + self.passes * inputs * outputs

    def _rounds(self) -> Iterator[tuple[Linear, int, int]]:
        """Yield each linear of each block, how often a pass computes its product, and how often those of its adapters."""
        again = {block.layer: block for block in self.recomputed}
        for layer in range(self.model.layers):
            backward = weights.backward_of(self.model, layer)
            for linear in linears(self.model):
                second = layer in again and linear.name not in again[layer].left_out
                rounds = 1 + second + (linear.name in backward.needed) + (not has_frozen_base(self.model))
                adapted = bool(linear.adapters) and layer in self.model.adapted_layers
                yield linear, rounds, (1 + (layer in again) + BACKWARD_SHARE) * adapted

    def elementwise_bytes(self) -> float:
        """Return the bytes between products. Backward moves twice those of forward: saved input, gradient in, gradient out.

        Gradients of weights accumulate in fp32 across passes: read, read, written once a pass. Per token and block, with width
        d, query and key width q, MLP width f: two norms 2 x 2d; two residual additions 2 x 3d; rotation 3q; the activation 2f,
        and 3f for the gate's product. An adapter's output is moved three times, as it is added to the linear's.
        """
        model = self.model
        rotated = (model.heads + model.kv_heads) * model.head_width
        of_block = FP32 * (4 + 6) * model.width + self.item * (3 * rotated + (5 if model.gated_mlp else 2) * model.mlp_width)
        of_adapters = self.item * 3.0 * sum(adapter.outputs for adapter in _adapters(model))
        share = BACKWARD_SHARE * self._share_with_backward()
        blocks = of_block * (model.layers * (1 + share) + len(self.recomputed))
        again = sum(block.adapted for block in self.recomputed)
        adapted = of_adapters * (len(model.adapted_layers) * (1 + share) + again)
        loss = self.head_share * (self.item + 2 * FP32) * model.classes * (1 + share)
        accumulated = 3.0 * FP32 * self.passes * model.trainable
        return self.tokens * (blocks + adapted + loss) + accumulated + self.passes * self.conversion_bytes()

    def _share_with_backward(self) -> float:
        """Return the share of the blocks that have a backward pass."""
        return 1 - weights.lowest_layer(self.model) / self.model.layers

    def conversion_bytes(self) -> float:
        """Return the bytes a pass reads and writes to make matrices in the product type out of the type they are stored in.

        Autocast converts a trained matrix once a pass (again where its block is recomputed), and its gradient back to
        fp32. A frozen one is converted for each of its products, forward and backward. Out of 4 bits the parts of a fused
        projection are unpacked apart and copied together. DoRA reads all rows in fp32.
        """
        item, model = self.item, self.model
        if not has_frozen_base(model):
            again = len(self.recomputed) / model.layers
            both_ways = FP32 + item if item != FP32 else 0
            return both_ways * (model.matmul_parameters * (2 + again) + model.head_parameters * 2)
        stored, head = weights.matrix_bytes(model), weights.other_bytes(model)
        total = float(model.head_parameters * (head + item)) if head != item else 0.0
        dora = {linear.name for linear in linears(model) if has_dora(model, f"{linear.name}.")}
        for linear, rounds, adapter_rounds in self._rounds():
            each = stored + item if stored != item and model.frozen_dtype not in EIGHT_BIT else 0.0
            each += 2 * item if model.frozen_dtype in FOUR_BIT and linear.name == "qkv" else 0
            total += rounds * linear.weights * each
            if linear.name in dora and adapter_rounds:
                made = adapter_rounds - BACKWARD_SHARE
                wide = stored + FP32 if stored != FP32 else 0.0
                total += made * linear.weights * (wide + DORA_PASSES * FP32)
        return total

    def operators(self) -> int:
        """Return how many operator calls eager PyTorch makes, for every weight tensor that the optimizer updates too."""
        model = self.model
        tensors = model.layers * len(model.shapes)           # about
        if has_frozen_base(model):
            tensors = sum(one.count for one in weights.trained_weights(model))
        casts = CAST_OPERATORS if weights.matrix_bytes(model) != self.item else 0
        share = BACKWARD_SHARE * self._share_with_backward()
        rounds = 1 + len(self.recomputed) / model.layers + share
        adapters = len(model.adapted_layers) * ADAPTER_OPERATORS * len(_adapters(model))
        head = HEAD_OPERATORS * (1 + BACKWARD_SHARE)
        passes = self.passes * round((model.layers * (FORWARD_OPERATORS + casts) + adapters) * rounds + head)
        return passes + OPTIMIZER_OPERATORS * tensors
