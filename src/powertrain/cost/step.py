"""One optimizer step, replayed: its passes through the blocks that need to be run, and the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from powertrain.cost.blocks import Kind, Unit
from powertrain.cost.forward import StepFacts, Tables, Weights, embed, is_rms, norm, rotary_tables, run_block
from powertrain.cost.fused import run_fused_block
from powertrain.cost.kernels import Shape
from powertrain.cost.loss import loss_of
from powertrain.cost.replay import WORKSPACE, Block, Gradients, Memory, Saved, Tape, Value

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
        """AdamW, one weight after the other: what it divides by is held until the next one's is made."""
        if self.facts.workload.updates_in_place:
            return
        divisor: Block | None = None
        for nbytes in self._updated():
            root = Block(self.memory, nbytes, WORKSPACE)
            divisor = Block(self.memory, nbytes, WORKSPACE)
            del root
        del divisor

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

