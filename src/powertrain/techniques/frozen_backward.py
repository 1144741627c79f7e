"""Frozen backward: no gradient for weights that are not trained, and no backward pass below the lowest that is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.decoder import Block
    from powertrain.models.kernels.attention import Attention
    from powertrain.models.model import Rotary, RunBlock


@dataclass(frozen=True)
class RecordedFrom:
    """Runs the blocks below `first` without recording anything for a backward pass."""

    inner: RunBlock
    first: int

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor:
        if index >= self.first:
            return self.inner(block, index, x, rotary, lengths, attention)
        import torch

        with torch.no_grad():
            return self.inner(block, index, x, rotary, lengths, attention)


@dataclass(frozen=True)
class FrozenBackward(Technique):
    """Of the three products of a linear, forward, for its input and for its weight, a frozen one needs two, or one.

    The gradient of a frozen weight is never computed, nor are the gradients of activations below the lowest trained weight.
    Autograd finds this by itself, unless something asks for the gradient of an input, as gradient checkpointing in other
    libraries does. Here it is ensured, and tested on an example before the run.
    """

    first: int = 0                           # the lowest block with a weight that is trained

    name = "frozen_backward"
    does = "computes no gradient for frozen weights"
    needs_whole_weights = True
    may_be_zero = frozenset({"first"})
    native_only = True
    exactness = Exactness.BITWISE
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "attention", "elementwise"})
    source = "PyTorch notes on autograd, locally disabling gradient computation"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model = run.model
        if not model.adapter_parameters:
            return cls.refuse(Why.DOES_NOT_APPLY, f"all {model.trainable:,} weights are trained, so every gradient is needed")
        first = min(model.adapted_layers, default=0)
        below = f", and blocks below {first} of {model.layers} need no backward pass" if first else ""
        return cls(first).on(f"{model.trainable:,} of {model.parameters:,} weights are trained{below}",
                             Effect((1.0, 1.0), 0, basis="formula: autograd computes the same gradients; the run tests that"),
                             numbers={"trained_weights": model.trainable})

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, run_block=RecordedFrom(setup.run_block, self.first))

    def confirm(self, setup: Setup) -> None:
        """Check which weights get a gradient from a pass of few tokens."""
        found = setup.runner(RecordedFrom)
        if found is None or found.first != self.first:
            raise NotApplied(f"frozen_backward: blocks are run by {name_of(setup.run_block)}, not recorded from block "
                             f"{self.first} on")
        wrong = [name for name, parameter in setup.model.named_parameters()
                 if (name in setup.trial.given) != parameter.requires_grad]
        if wrong:
            raise NotApplied(f"frozen_backward: {len(wrong)} weights have a gradient and are not trained, or the reverse, such "
                             f"as {wrong[0]}")
        if (lowest := min(setup.trial.recorded, default=self.first)) < self.first:
            raise NotApplied(f"frozen_backward: block {lowest} is recorded, which lies below block {self.first}")
