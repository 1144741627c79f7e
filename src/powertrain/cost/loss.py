"""Head and loss of a step, all logits at once or in chunks, with sizes in place of tensors; see forward.py."""

from __future__ import annotations

from powertrain.cost.forward import StepFacts, Weights
from powertrain.cost.operators import FP32, cast_weight, convert, linear, unary
from powertrain.cost.replay import LOSS, Block, Gradients, Saved, Tape, Value

INDEX_BYTES = 8                              # int64


def loss_of(tape: Tape, facts: StepFacts, outside: Weights, hidden: Value) -> Value:
    """() the loss summed over the tokens."""
    head = outside.get("head.weight") or outside["embedding.weight"]
    with tape.counting_as(LOSS):
        if facts.workload.loss_chunk_rows is not None:
            return _chunked_loss(tape, facts, head, hidden)
        if facts.is_autocast:
            head = cast_weight(tape, head, facts.item)
            hidden = convert(tape, hidden, facts.item)
        elif head.item != hidden.item:
            head = convert(tape, head, hidden.item)
        logits = convert(tape, linear(tape, hidden, head, None, facts.model.width), FP32)
        shares = unary(tape, logits, saves_result=True)      # log softmax
        nbytes = shares.nbytes
        node = tape.node((shares,), (shares.block,), lambda saved, gradients: [tape.new(nbytes)])
        return Value(tape.new(FP32), 1, FP32, node)


def _chunked_loss(tape: Tape, facts: StepFacts, head: Value, hidden: Value) -> Value:
    """The gradients of hidden rows and head are made at once, chunk by chunk."""
    width, vocabulary, item = facts.model.width, facts.model.vocabulary, facts.item
    needs_hidden, needs_head = hidden.node is not None, head.node is not None
    nbytes = hidden.nbytes

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        made = list(saved)
        scaled = tape.new(nbytes) if needs_hidden else None
        return [scaled, made[1]]

    small_head = tape.new(head.count * item) if head.item != item else None
    hidden_gradient = tape.new(nbytes) if needs_hidden else None
    head_gradient = tape.new(head.count * FP32) if needs_head else None
    trained = round(facts.workload.trained_share * hidden.count // width)
    indices = tape.new(trained * INDEX_BYTES)
    held: list[Block | None] = [None] * 5    # x, logits, the gradient in a product's type, the normaliser, what indices took
    rows = facts.workload.loss_chunk_rows or trained
    for size in [rows] * min(2, trained // rows) + ([trained % rows] if trained % rows else []):
        _loss_chunk(tape, held, size, (width, vocabulary, item), needs_hidden, head_gradient is not None)
    node = tape.node((hidden, head), (hidden_gradient, head_gradient), back)
    del small_head, indices
    return Value(tape.new(FP32), 1, FP32, node)


def _loss_chunk(tape: Tape, held: list[Block | None], rows: int, sizes: tuple[int, int, int], needs_hidden: bool,
                needs_head: bool) -> None:
    """One chunk; its tensors take the places of the last one's."""
    width, vocabulary, item = sizes
    gathered = tape.new(rows * width * FP32)
    held[0] = gathered if item == FP32 else tape.new(rows * width * item)
    del gathered
    product = tape.new(rows * vocabulary * item)
    held[1] = product if item == FP32 else tape.new(rows * vocabulary * FP32)
    del product
    exponentials = tape.new(rows * vocabulary * FP32)
    del exponentials
    held[2] = held[1] if item == FP32 else tape.new(rows * vocabulary * item)
    if needs_hidden:
        back = tape.new(rows * width * item)
        wide = None if item == FP32 else tape.new(rows * width * FP32)
        del back, wide
    if needs_head:
        product = tape.new(vocabulary * width * item)
        wide = None if item == FP32 else tape.new(vocabulary * width * FP32)
        del product, wide
