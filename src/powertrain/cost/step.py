"""One optimizer step with sizes in place of tensors: its passes through the blocks, head and loss, the update.

Of many equal blocks behind each other only the first and the last are run. Memory moves by the same amount with each of them,
forward and backward, so it is fullest at one of the ends; what those between take and give is what their neighbours did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from powertrain.cost.forward import StepFacts, Tables, Weights, embed, is_rms, norm, rotary_tables, run_block
from powertrain.cost.fused import run_fused_block
from powertrain.cost.kernels import Shape
from powertrain.cost.operators import cast_weight, convert, linear, unary
from powertrain.cost.replay import LOSS, WORKSPACE, Block, Gradients, Memory, Saved, Tape, Value
from powertrain.cost.weights import has_frozen_base, lowest_layer
from powertrain.records import ModelFacts
from powertrain.shapes import FP32

ENDS = 2                                     # the first and the last of a row of equal units


@dataclass(frozen=True)
class Kind:
    """What makes two blocks equal to the replay."""

    is_adapted: bool
    is_checkpointed: bool
    reads_a_gradient: bool                   # its input needs one
    is_light: bool = False                   # not all that its backward pass needs is kept


@dataclass(frozen=True)
class Unit:
    """As many blocks as pass until the kinds repeat, and how many equal units there are in front of it that are not run."""

    kinds: tuple[Kind, ...]
    left_out: int = 0


def kinds_of(model: ModelFacts, every: int, light: int = 0) -> tuple[Kind, ...]:
    """Of all blocks, when every `every`-th one is checkpointed, if it has a backward pass; 0: none.

    `light`: how many of those that have a backward pass do not keep all that it needs, from below.
    """
    frozen, lowest = has_frozen_base(model), lowest_layer(model)
    return tuple(Kind(is_adapted=layer in model.adapted_layers,
                      is_checkpointed=bool(every) and layer % every == 0 and layer >= lowest,
                      reads_a_gradient=not frozen or layer > lowest,
                      is_light=lowest <= layer < lowest + light) for layer in range(model.layers))


def units_of(kinds: tuple[Kind, ...], period: int) -> list[Unit]:
    """The units to run, in order; those between the ends of a row of equal ones are left out."""
    found: list[Unit] = []
    first = 0
    while first < len(kinds):
        unit = kinds[first:first + period]
        count = 1
        while kinds[first + count * period:first + (count + 1) * period] == unit:
            count += 1
        found.append(Unit(unit))
        if count > 1:
            found.append(Unit(unit, left_out=count - ENDS))
        first += count * len(unit)
    return found


# ------------------------------------------------------------------------------------------------ head and loss

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


# ------------------------------------------------------------------------------------------------ the step

Held = Mapping[str, int]


@dataclass
class Replayed:
    """A unit of blocks with its weights, and what is remembered of a pass."""

    unit: Unit
    weights: list[Weights]
    before: Held = field(default_factory=dict)       # what was held when its backward pass began
    casts: tuple[int, ...] = ()                      # the copies of weights that it made


class Step:
    """`memory` holds what stands from the beginning."""

    def __init__(self, facts: StepFacts, memory: Memory, units: list[Unit]) -> None:
        self.facts, self.memory = facts, memory
        self.outside = Weights(facts, "")
        self.units = [Replayed(unit, [Weights(facts, "blocks.0.", adapted=kind.is_adapted) for kind in unit.kinds])
                      for unit in units]

    def run_pass(self, lengths: tuple[int, ...]) -> None:
        """Forward and backward over documents of these lengths."""
        tape = Tape(self.memory, is_cuda=self.facts.workload.device == "cuda")
        loss = self._loss(tape, lengths)
        self._leave_autocast(tape)
        tape.component = WORKSPACE
        if loss.node is not None:
            tape.backward(loss)

    def update(self) -> None:
        """Update one weight after the other. The last tensor that an update makes is held until the next weight's is made."""
        tensors = self.facts.workload.update_tensors
        last: Block | None = None
        for nbytes in self._updated() if tensors else ():
            others = [Block(self.memory, nbytes, WORKSPACE) for _ in range(tensors - 1)]
            last = Block(self.memory, nbytes, WORKSPACE)
            del others
        del last

    def _updated(self) -> list[int]:
        """Bytes of what is updated at a time, in the optimizer's order: as the model has them, those that decay first."""
        first, last = ([(name, value) for name, value in self.outside.values.items() if ("embedding" in name) == is_first]
                       for is_first in (True, False))
        flat = self.facts.workload.flat_parameters       # then those of units that are not run count, too
        blocks = [item for replayed in self.units for _ in range(1 + replayed.unit.left_out if flat else 1)
                  for weights in replayed.weights for item in weights.values.items()]
        trained = [(name, value.nbytes) for name, value in (*first, *blocks, *last) if value.node is not None]
        groups = [[nbytes for name, nbytes in trained if self.facts.decays(name) == decays] for decays in (True, False)]
        return [sum(group) for group in groups] if flat else [*groups[0], *groups[1]]

    def _loss(self, tape: Tape, lengths: tuple[int, ...]) -> Value:
        model, workload = self.facts.model, self.facts.workload
        shape = Shape(model.heads, model.kv_heads, model.head_width, lengths, model.window, model.dropout, workload.threads)
        x = embed(tape, self.facts, self.outside, shape.tokens)
        tables = rotary_tables(tape, self.facts, shape.tokens)
        change: Held = {}
        for replayed in self.units:
            self.memory.change(_times(change, replayed.unit.left_out))
            before, casts = dict(self.memory.held), len(tape.casts)
            x = self._run_unit(tape, replayed, x, tables, shape)
            change = _change(before, self.memory.held)
            replayed.casts = tuple(tape.casts)[casts:]
        hidden = norm(tape, self.facts, self.outside, "norm", x, model.width, rms=is_rms(model))
        return loss_of(tape, self.facts, self.outside, hidden)

    def _run_unit(self, tape: Tape, replayed: Replayed, x: Value, tables: Tables | None, shape: Shape) -> Value:
        """Where others are left out in front of it, it is noticed when its backward pass begins and when it is done."""
        leaves_out = replayed.unit.left_out > 0
        if leaves_out:
            x = _noticed(tape, x, partial(self._leave_out, replayed))
        for kind, weights in zip(replayed.unit.kinds, replayed.weights, strict=True):
            x = self._run_block(tape, kind, weights, x, tables, shape)
        return _noticed(tape, x, partial(self._begin_backward, replayed)) if leaves_out else x

    def _run_block(self, tape: Tape, kind: Kind, weights: Weights, x: Value, tables: Tables | None, shape: Shape) -> Value:
        run = partial(self._plainly, tape, kind, weights, tables, shape)
        if not kind.is_checkpointed:
            return run(x)
        return tape.checkpoint(run, x, keeps=self.facts.workload.checkpoint_keeps_attention and not self.facts.model.dropout)

    def _plainly(self, tape: Tape, kind: Kind, weights: Weights, tables: Tables | None, shape: Shape, x: Value) -> Value:
        if not self.facts.workload.fused_blocks:
            return run_block(tape, self.facts, weights, x, tables, shape)
        saving = self.facts.workload.saved if kind.is_light else {}
        return run_fused_block(tape, self.facts, weights, x, tables, shape, saving)

    def _begin_backward(self, replayed: Replayed) -> None:
        replayed.before = dict(self.memory.held)

    def _leave_out(self, replayed: Replayed) -> None:
        """What the units that are not run would have changed in their backward pass, as this one did."""
        self.memory.change(_times(_change(replayed.before, self.memory.held), replayed.unit.left_out))

    def _leave_autocast(self, tape: Tape) -> None:
        """Copies of weights that nothing has saved go, also those of units that are not run."""
        for replayed, following in zip(self.units, self.units[1:], strict=False):
            if not following.unit.left_out:
                continue
            before = dict(self.memory.held)
            for key in replayed.casts:
                del tape.casts[key]
            self.memory.change(_times(_change(before, self.memory.held), following.unit.left_out))
        tape.casts.clear()


def _noticed(tape: Tape, x: Value, notice: partial[None]) -> Value:
    """x, with a call when its gradient is complete."""
    def back(saved: Saved, gradients: Gradients) -> Gradients:
        notice()
        return gradients

    node = tape.node((x,), (), back)
    return Value(x.block, x.count, x.item, node)


def _change(before: Held, after: Held) -> Held:
    return {name: after[name] - before.get(name, 0) for name in after}


def _times(change: Held, count: int) -> Held:
    return {name: count * nbytes for name, nbytes in change.items() if nbytes}
