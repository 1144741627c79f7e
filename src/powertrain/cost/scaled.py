"""A product in 8 bits, in sizes: what rounding its operands and summing them makes, forward and backward.

Read it beside models/kernels/scaled.py; see replay.py for the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.cost.gradients import Linear
from powertrain.cost.replay import Block, Gradients, Saved, Tape, Value
from powertrain.shapes import FP8, FP32

INT32 = 4


@dataclass(frozen=True)
class ScaledSizes:
    """One linear of a base held as `stored`, whose products come out with `item` bytes a number."""

    tape: Tape
    part: Linear
    stored: str
    item: int

    def project(self, x: Value) -> Value:
        """x (rows, in) -> (rows, out)."""
        part, rows, given = self.part, x.count // self.part.inputs, x.item

        def back(saved: Saved, gradients: Gradients) -> Gradients:
            scaled = self.tape.new(rows * part.outputs * FP32)
            codes = self._rounded(rows * part.outputs, FP32)
            del scaled
            return [self._product(rows * part.inputs, codes, given, turned=True)]

        node = self.tape.node((x,), (), back)
        codes = self._rounded(x.count, given)
        return Value(self._product(rows * part.outputs, codes, self.item), rows * part.outputs, self.item, node)

    def _rounded(self, count: int, item: int) -> Block:
        """The codes of `count` numbers of `item` bytes."""
        magnitudes = self.tape.new(count * item)
        del magnitudes
        wide = self.tape.new(count * FP32)
        codes = self.tape.new(count)
        del wide
        return codes

    def _product(self, count: int, codes: Block, item: int, *, turned: bool = False) -> Block:
        """`count` sums of what `codes` met, as numbers of `item` bytes."""
        if self.stored == FP8:
            matrix = self.tape.new(self.part.weights) if turned else None
            sums = self.tape.new(count * 2)
            del matrix, codes
            return sums if item == 2 else self.tape.new(count * item)
        whole = self.tape.new(count * INT32)
        sums = self.tape.new(count * FP32)
        del whole, codes
        return sums if item == FP32 else self.tape.new(count * item)
