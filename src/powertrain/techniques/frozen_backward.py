"""Frozen backward: no gradient for weights that are not trained, and no backward pass below the lowest that is."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Technique, find_runner, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.decoder import Block
    from powertrain.models.kernels.attention import Attention
    from powertrain.models.model import Rotary, RunBlock
    from powertrain.training.setup import Setup

LOOKED_AT = 32               # examples, of which the shortest is tried


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
        """Differentiate the loss of one short example, and check which weights have a gradient."""
        found = find_runner(setup.run_block, RecordedFrom)
        if found is None or found.first != self.first:
            raise NotApplied(f"frozen_backward: blocks are run by {name_of(setup.run_block)}, not recorded from block "
                             f"{self.first} on")
        recorded: list[int] = []
        few = [setup.examples[i] for i in range(min(LOOKED_AT, len(setup.examples)))]
        batch = setup.batch_of([min(few, key=lambda example: example.tokens)]).to(setup.device)
        with ExitStack() as watching:
            for index, block in enumerate(setup.model.get_submodule("blocks").children()):
                watching.enter_context(block.register_forward_hook(
                    lambda module, inputs, output, index=index: recorded.append(index) if output.requires_grad else None))
            setup.batch_loss(batch).backward()  # type: ignore[no-untyped-call]
        wrong = [name for name, parameter in setup.model.named_parameters()
                 if (parameter.grad is not None) != parameter.requires_grad]
        setup.model.zero_grad(set_to_none=True)
        if wrong:
            raise NotApplied(f"frozen_backward: {len(wrong)} weights have a gradient and are not trained, or the reverse, such "
                             f"as {wrong[0]}")
        if recorded and min(recorded) < self.first:
            raise NotApplied(f"frozen_backward: block {min(recorded)} is recorded, which lies below block {self.first}")
