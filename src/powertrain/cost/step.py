"""One optimizer step with sizes in place of tensors: the blocks to run, head and loss, passes, the update.

Of a row of equal blocks only the first and the last are run. Each block changes the memory by the same amount, forward and
backward, so the fullest moment is at one of the ends. The change by the blocks in between is that of their neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from powertrain.cost import weights
from powertrain.cost.collectives import buckets_of, weights_of_block, weights_outside
from powertrain.cost.forward import Part, StepFacts, Tables, Weights
from powertrain.cost.fused import FusedPart, OneCallPart
from powertrain.cost.kernels import Shape
from powertrain.cost.operators import cast_weight, convert, linear, operator, unary
from powertrain.cost.replay import GRADIENTS, LOSS, WORKSPACE, Block, Gradients, Leaf, Memory, Saved, Tape, Value
from powertrain.cost.sharding import Exchanges, Group
from powertrain.shapes import FP32, one_call_saved, whole_pass_bytes

INDEX_BYTES = 8                              # int64
ENDS = 2                                     # the first and the last of a row of equal units
RECEIVED = "received"                        # from other stages


# ------------------------------------------------------------------------------------------------ blocks to run


@dataclass(frozen=True)
class Kind:
    """The properties by which blocks differ in the replay."""

    is_adapted: bool
    is_checkpointed: bool
    reads_a_gradient: bool                   # its input needs a gradient
    is_light: bool = False                   # it puts saved activations away
    frozen: frozenset[str] = frozenset()     # its weights that the recipe freezes
    apart: int | None = None                 # its place, if other weights than those of its neighbours are gathered around it


@dataclass
class Unit:
    """Blocks to run, as many as pass until the kinds repeat."""

    kinds: tuple[Kind, ...]
    left_out: int                            # equal units in front of it that are not run
    weights: list[Weights]
    groups: list[Group]
    casts: tuple[int, ...] = ()              # the copies of weights that it made in this pass


def units_of(facts: StepFacts, *, leaves_out: bool = True) -> list[Unit]:
    """Return the units to run, in order; those between the ends of a row of equal ones are left out.

    The blocks below the lowest trained weight have no backward pass. Those above it that put activations away are the lowest.
    """
    model, every, light = facts.model, facts.workload.checkpoint_every, facts.workload.saved_blocks
    frozen, lowest = weights.has_frozen_base(model) or bool(model.frozen), weights.lowest_layer(model)
    kinds = tuple(Kind(is_adapted=layer in model.adapted_layers,
                       is_checkpointed=bool(every) and layer % every == 0 and layer >= lowest,
                       reads_a_gradient=not frozen or layer > lowest,
                       is_light=lowest <= layer < lowest + light, frozen=weights.frozen_in(model, layer),
                       apart=_apart(facts, layer)) for layer in range(model.layers))
    period = max(1, every) if leaves_out else 1
    found: list[Unit] = []
    first = 0
    while first < len(kinds):
        unit = kinds[first:first + period]
        count = 1
        while leaves_out and kinds[first + count * period:first + (count + 1) * period] == unit:
            count += 1
        for left_out in (0, count - ENDS)[:count]:
            of_blocks = [facts.weights_of_block(adapted=kind.is_adapted, frozen=kind.frozen) for kind in unit]
            groups = [Group(weights_of_block(model, adapted=kind.is_adapted, frozen=kind.frozen), of_block.values(),
                            facts.workload.shards)
                      for kind, of_block in zip(unit, of_blocks, strict=True)]
            found.append(Unit(unit, left_out, of_blocks, groups))
        first += count * len(unit)
    return found


def _apart(facts: StepFacts, layer: int) -> int | None:
    """Return the layer if what is exchanged before or after it is not that of a block, as it is between blocks."""
    return layer if facts.workload.shards > 1 and layer in (0, facts.model.layers - 1) else None


# ------------------------------------------------------------------------------------------------ head and loss


def loss_of(outside: Part, hidden: Value) -> Value:
    """Return the loss () summed over the tokens."""
    tape, facts = outside.tape, outside.facts
    head = outside.weights.get("head.weight") or outside.weights["embedding.weight"]
    with tape.having(component=LOSS):
        if facts.workload.loss_chunk_rows is not None:
            return _chunked_loss(tape, facts, head, hidden)
        if facts.is_autocast:
            head = cast_weight(tape, head, facts.item)
            hidden = convert(tape, hidden, facts.item)
        elif head.item != hidden.item:
            head = convert(tape, head, hidden.item)
        logits = convert(tape, linear(tape, hidden, head, None, facts.model.width), FP32)
        if facts.workload.loss_has_terms:
            return _loss_with_terms(tape, logits, hidden.count // facts.model.width)
        shares = unary(tape, logits, saves_result=True)      # log softmax
        return operator(tape, (shares,), 1, FP32, saves=(shares.block,))


def _loss_with_terms(tape: Tape, logits: Value, rows: int) -> Value:
    """Return the loss with label smoothing or z-loss, made of the softmax's normaliser and of the targets' logits.

    Both have gradients of the size of all logits; that of the normaliser is made by way of two more tensors of this size.
    """
    tape.scratch(logits.nbytes)              # exponentials
    differences_bytes = 2 * logits.nbytes    # and their exponentials
    normaliser = operator(tape, (logits,), rows, FP32, saves=(logits.block,), works=lambda: tape.scratch(differences_bytes))
    chosen = operator(tape, (logits,), rows, FP32, saves=(logits.block,))
    return operator(tape, (normaliser, chosen), 1, FP32)


def _chunked_loss(tape: Tape, facts: StepFacts, head: Value, hidden: Value) -> Value:
    """Make the loss chunk by chunk, and with it the gradients of the hidden rows and of the head."""
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
        _loss_chunk(tape, held, size, (width, vocabulary, item), needs_hidden, head_gradient is not None,
                    in_place=facts.workload.loss_in_place)
    node = tape.node((hidden, head), (hidden_gradient, head_gradient), back)
    del small_head, indices
    return Value(tape.new(FP32), 1, FP32, node)


def _loss_chunk(tape: Tape, held: list[Block | None], rows: int, sizes: tuple[int, int, int], needs_hidden: bool,
                needs_head: bool, *, in_place: bool) -> None:
    """Run one chunk; its tensors take the places of the last one's."""
    width, vocabulary, item = sizes
    gathered = tape.new(rows * width * FP32)
    held[0] = gathered if item == FP32 else tape.new(rows * width * item)
    del gathered
    product = tape.new(rows * vocabulary * item)
    held[1] = product if item == FP32 or in_place else tape.new(rows * vocabulary * FP32)
    del product
    if not in_place:
        tape.scratch(rows * vocabulary * FP32)           # exponentials
    held[2] = held[1] if item == FP32 or in_place else tape.new(rows * vocabulary * item)
    for needed, count in ((needs_hidden, rows * width), (needs_head, vocabulary * width)):
        gradient = tape.new(count * item) if needed else None
        if needed and item != FP32:
            tape.scratch(count * FP32)
        del gradient


# ------------------------------------------------------------------------------------------------ the step


class Step:
    """The passes and the update of one step. `memory` holds what stands from the beginning."""

    def __init__(self, facts: StepFacts, memory: Memory, *, leaves_out: bool) -> None:
        self.facts, self.memory = facts, memory
        self.outside, self.units = facts.weights_outside(), units_of(facts, leaves_out=leaves_out)
        self.group = Group(weights_outside(facts.model), self.outside.values(), facts.workload.shards)
        self.exchanges = Exchanges(memory, facts.workload, self.group) if facts.workload.shards > 1 else None

    def run_pass(self, lengths: tuple[int, ...], *, is_last: bool) -> None:
        """Run forward and backward over documents of these lengths."""
        tape = Tape(self.memory, is_cuda=self.facts.workload.device == "cuda", keeps_casts=self.exchanges is None)
        if self.exchanges is not None:
            self.exchanges.is_last = is_last
        loss = self._forward(tape, lengths)
        if loss.node is not None:
            tape.backward(loss)
        if self.exchanges is not None:
            self.exchanges.after_pass()

    def sum_gradients(self) -> None:
        """Sum the gradients over processes that hold the whole model, in buckets. A bucket is held until the next is made."""
        bucket: Block | None = None
        for nbytes in buckets_of(self.facts.model) if self.facts.workload.replicas > self.facts.workload.shards == 1 else ():
            bucket = Block(self.memory, nbytes, WORKSPACE)
        del bucket

    def update(self) -> None:
        """Update one weight after the other. The last tensor that an update makes is held until the next weight's is made."""
        workload = self.facts.workload
        tensors = 0 if workload.fused_optimizer else workload.optimizer.update_tensors       # fp32, of a weight's size
        last: Block | None = None
        for nbytes in self._updated() if tensors else ():
            others = [Block(self.memory, nbytes, WORKSPACE) for _ in range(tensors - 1)]
            last = Block(self.memory, nbytes, WORKSPACE)
            del others
        del last

    def _updated(self) -> list[int]:
        """Return the bytes of each weight, or flat buffer, in the order of the update: those with weight decay first."""
        first, last = ([item for item in _parts(self.outside, self.group) if ("embedding" in item[0]) == is_first]
                       for is_first in (True, False))
        flat = self.facts.workload.flat_parameters       # then those of units that are not run count, too
        blocks = [item for unit in self.units for _ in range(1 + unit.left_out if flat else 1)
                  for of_block, group in zip(unit.weights, unit.groups, strict=True) for item in _parts(of_block, group)]
        trained = [*first, *blocks, *last]
        groups = [[nbytes for name, nbytes in trained if _decays(name) == decays] for decays in (True, False)]
        return [sum(group) for group in groups] if flat else [*groups[0], *groups[1]]

    def _forward(self, tape: Tape, lengths: tuple[int, ...]) -> Value:
        """Return the loss."""
        model, workload = self.facts.model, self.facts.workload
        shape = Shape(model.heads, model.kv_heads, model.head_width, lengths, model.window, model.dropout, workload.threads,
                      workload.fused_attention)
        outside = Part(tape, self.facts, self.outside)
        if workload.whole_pass:
            return self._whole(outside, shape.tokens)
        if self.exchanges is not None:
            self.exchanges.before_forward(self.group)
        x = self._entered(outside, shape.tokens)
        tables = outside.rotary_tables(shape.tokens)
        before: dict[str, int] = {}
        for unit in self.units:
            self.memory.repeat(before, unit.left_out)
            before, casts = dict(self.memory.held), len(tape.casts)
            x = self._run_unit(tape, unit, x, tables, shape)
            unit.casts = tuple(tape.casts)[casts:]
        loss = self._left(outside, x)
        del x
        self._leave_autocast(tape)
        tape.component = WORKSPACE
        return loss

    def _whole(self, outside: Part, tokens: int) -> Value:
        """Return the loss of a pass that is one function; see models/kernels/block. Gradients have memory from the start."""
        tape, model, item = outside.tape, self.facts.model, self.facts.item
        tables, before = [outside.rotary_tables(tokens)], dict[str, int]()
        inputs, made = self._gradients(self.outside)
        for unit in self.units:
            self.memory.repeat(before, unit.left_out)
            before = dict(self.memory.held)
            for of_block in unit.weights:
                found = self._gradients(of_block)
                inputs, made = inputs + found[0], made + found[1]
        kept, forward, backward = whole_pass_bytes(model, model.vocabulary, tokens, item)
        numbers, statistics = one_call_saved(model, tokens)
        saved = [tape.new(nbytes) for nbytes in (model.layers * numbers * item, model.layers * statistics * FP32, kept)]
        tape.scratch(forward)

        def back(_: Saved, gradients: Gradients) -> Gradients:
            tape.scratch(backward)
            saved.clear()
            tables.clear()
            return made

        return Value(tape.new(0), 1, FP32, tape.node(tuple(inputs), (), back))

    def _gradients(self, of: Weights) -> tuple[list[Value], Gradients]:
        """Return weights and the memory of their gradients; None where they have some already."""
        leaves = {name: value.node for name, value in of.items()}
        return list(of.values()), [None if isinstance(leaf, Leaf) and (leaf.stands or leaf.gradient) else
                                   Block(self.memory, of[name].nbytes, GRADIENTS) for name, leaf in leaves.items()]

    def _entered(self, outside: Part, tokens: int) -> Value:
        """Return what the first block reads."""
        return outside.embed(tokens)

    def _left(self, outside: Part, x: Value) -> Value:
        """Return the loss, of what the last block gives."""
        hidden = outside.norm("norm", x, self.facts.model.width, rms=self.facts.is_rms)
        return loss_of(outside, self._after_forward(outside.tape, self.group, hidden))

    def _run_unit(self, tape: Tape, unit: Unit, x: Value, tables: Tables | None, shape: Shape) -> Value:
        """Run its blocks. If units in front of it are left out, repeat the change of memory by its backward pass."""
        before: dict[str, int] = {}
        if unit.left_out:
            x = _noticed(tape, x, lambda: self.memory.repeat(before, unit.left_out))
        for kind, of_block, group in zip(unit.kinds, unit.weights, unit.groups, strict=True):
            x = self._before_forward(tape, group, x)
            run = partial(self._run_block, tape, kind, of_block, tables, shape)
            keeps = self.facts.workload.checkpoint_keeps_attention and not self.facts.model.dropout
            x = tape.checkpoint(run, x, keeps=keeps) if kind.is_checkpointed else run(x)
            x = self._after_forward(tape, group, x)
        return _noticed(tape, x, lambda: before.update(self.memory.held)) if unit.left_out else x

    def _before_forward(self, tape: Tape, group: Group, x: Value) -> Value:
        if (exchanges := self.exchanges) is None:
            return x
        exchanges.before_forward(group)
        return _noticed(tape, x, lambda: exchanges.after_backward(group))

    def _after_forward(self, tape: Tape, group: Group, x: Value) -> Value:
        if (exchanges := self.exchanges) is None:
            return x
        exchanges.after_forward(group)
        return _noticed(tape, x, lambda: exchanges.before_backward(group))

    def _run_block(self, tape: Tape, kind: Kind, of_block: Weights, tables: Tables | None, shape: Shape, x: Value) -> Value:
        if not self.facts.workload.fused_blocks:
            return Part(tape, self.facts, of_block).run_block(x, tables, shape)
        if self.facts.workload.one_call:
            return OneCallPart(tape, self.facts, of_block).run_block(x, tables, shape)
        saving = self.facts.workload.saved if kind.is_light else {}
        return FusedPart(tape, self.facts, of_block, x.count // self.facts.model.width, saving).run_block(x, tables, shape)

    def _leave_autocast(self, tape: Tape) -> None:
        """Let go of the copies of weights that no operator has saved, also those of units that are not run."""
        for unit, following in zip(self.units, self.units[1:], strict=False):
            before = dict(self.memory.held)
            for key in unit.casts if following.left_out else ():
                del tape.casts[key]
            self.memory.repeat(before, following.left_out)
        tape.casts.clear()


class StageStep(Step):
    """The step of one stage of a pipeline, `place` of `stages`, whose blocks and other weights are `facts.model`. See 1F1B."""

    def __init__(self, facts: StepFacts, memory: Memory, place: int, stages: int) -> None:
        super().__init__(facts, memory, leaves_out=False)
        self.is_first, self.is_last, self.at_once = place == 0, place == stages - 1, stages - place
        self.given = Leaf(WORKSPACE)

    def run_passes(self, passes: Sequence[tuple[int, ...]]) -> None:
        """Go forward with as many passes as the stages from here on hold, then backward with one and forward with the next.

        A gradient for the stage before stays until the next one is sent.
        """
        begun: list[tuple[Tape, Value, Leaf]] = []
        sent: Block | None = None
        waiting = list(passes)
        while waiting or begun:
            if waiting and len(begun) < self.at_once:
                tape = Tape(self.memory, is_cuda=self.facts.workload.device == "cuda")
                self.given = Leaf(WORKSPACE)
                begun.append((tape, self._forward(tape, waiting.pop(0)), self.given))
                continue
            tape, value, given = begun.pop(0)
            if value.node is not None:
                tape.backward(value, None if self.is_last else self._received())
            sent, given.gradient = given.gradient, None
            del tape, value, given
        del sent

    def _received(self) -> Block:
        """Return a gradient that lies in a buffer of the schedule, which nothing may be added to."""
        block = Block(self.memory, 0, RECEIVED)
        block.is_viewed = True
        return block

    def _entered(self, outside: Part, tokens: int) -> Value:
        if self.is_first:
            return super()._entered(outside, tokens)
        return Value(Block(self.memory, 0, RECEIVED), tokens * self.facts.model.width, FP32, self.given)

    def _left(self, outside: Part, x: Value) -> Value:
        return super()._left(outside, x) if self.is_last else x


def _noticed(tape: Tape, x: Value, notice: Callable[[], None]) -> Value:
    """Return x, with a call when its gradient is complete."""
    def back(saved: Saved, gradients: Gradients) -> Gradients:
        notice()
        return gradients

    node = tape.node((x,), (), back)
    return Value(x.block, x.count, x.item, node)


def _parts(of_group: Weights, group: Group) -> list[tuple[str, int]]:
    """Return name and bytes of this process's part of each trained weight."""
    return [(name, weight.part(group.shards) * FP32)
            for (name, value), weight in zip(of_group.items(), group.weights, strict=True) if value.node is not None]


def _decays(name: str) -> bool:
    """Return whether weight decay acts on the weight: on matrices."""
    return name.endswith((".A", ".B")) or (name.endswith("weight") and "norm" not in name)
