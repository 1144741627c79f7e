"""Whole pass: a small model's pass, from the tokens to all gradients, as two calls of our own kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from powertrain.models.kernels import build
from powertrain.records import Batch, Effect, NotApplied, Proposal, Refusal, Why, WrongUse
from powertrain.techniques.base import Exactness, PlannedRun, Technique, name_of
from powertrain.training.objectives import NextToken, objective_of

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from powertrain.models.kernels.block import model
    from powertrain.training.objective import Sums
    from powertrain.training.setup import Lap, Setup

GAIN, STUDY = (0.91, 0.95), "2026-11-27_whole-pass-char-cpu"
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}          # of all gradients together, by the type of products


@dataclass(frozen=True)
class InTwoCalls:
    """Runs every pass of the training by our own kernel."""

    whole: model.WholePass

    def __call__(self, setup: Setup, batch: Batch, units: float, scaler: GradScaler, lap: Lap) -> Sums:
        import torch

        from powertrain.models.kernels.block.model import Forward

        begun = Forward(self.whole, batch, setup.precision.compute_dtype, scaler.get_scale() / units)
        lap("forward")
        begun.backward()
        lap("backward")
        return {"loss": torch.tensor(begun.loss / units)}


@dataclass(frozen=True)
class WholePass(Technique):
    """Between the blocks of a small model, which are a call each, torch and Python still work call by call.

    Here the embeddings, all blocks, the last norm, the head, the cross-entropy and their gradients are one call forward and one
    backward, and nothing is recorded by autograd. What is computed is the same, with the same rounding. Held-out text is still
    evaluated block by block.
    """

    name = "whole_pass"
    does = "computes a pass, from the tokens to all gradients, in two calls"
    needs_whole_weights = True
    decides: ClassVar = {"whole_pass": True}
    native_only = True
    needs_all_trained = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_pass"})
    acts_on = frozenset({"products", "attention", "loss", "elementwise"})
    source = "llm.c (Karpathy 2024): a training pass without a graph"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        objective = objective_of(run.recipe)
        if not isinstance(objective, NextToken) or objective.metrics or objective.embedding_noise:
            return cls.refuse(Why.DOES_NOT_APPLY, "the kernel computes plain cross-entropy of the next token only")
        if not run.decided.one_call:
            return cls.refuse(Why.DOES_NOT_APPLY, "this needs blocks that are one call each, as those of small models are "
                              "(techniques.fused_blocks.kernels=one_call)",
                              cure=("techniques.fused_blocks.kernels=one_call",), rival="fused_blocks")
        if run.decided.loss_chunk_rows is not None:
            return cls.refuse(Why.CONFLICT, "the kernel computes all logits at once, and they are to be computed in chunks",
                              cure=("techniques.chunked_cross_entropy=off",), rival="chunked_cross_entropy")
        return cls().on("blocks are one call each, and so can all of a pass be; it spares the calls between them",
                        Effect(GAIN, 0, basis=f"study: {STUDY}"))

    def compiles(self) -> bool:
        return True

    def build(self) -> None:
        self.build_kernels((build.BLOCK,), "its kernel", "techniques.whole_pass=off trains without it", None)

    def apply(self, setup: Setup) -> Setup:
        self.build()
        from powertrain.models.decoder import Decoder
        from powertrain.models.kernels.block import model

        assert isinstance(setup.model, Decoder)
        try:
            return replace(setup, run_pass=InTwoCalls(model.WholePass(setup.model)))
        except WrongUse as error:
            raise NotApplied(f"whole_pass: {error}; set it to off") from error

    def confirm(self, setup: Setup) -> None:
        """Compare a pass of few tokens, run twice, with the pass by autograd, whose kernels must be the same."""
        from powertrain.models.kernels.attention import ragged_attention
        from powertrain.models.kernels.block.whole import OneCall
        from powertrain.training.setup import run_eagerly

        if not isinstance(setup.run_pass, InTwoCalls):
            raise NotApplied(f"whole_pass: passes are run by {name_of(setup.run_pass)}")
        blocks = getattr(setup.run_block, "blocks", ())
        if not blocks or not all(isinstance(block, OneCall) for block in blocks) or setup.attention is not ragged_attention:
            raise NotApplied("whole_pass: it has the kernels of blocks in one call and of ragged attention, and others are in "
                             "force; set it to off")
        few, dtype = setup.few_tokens(1, examples=1), str(setup.precision.compute_dtype).removeprefix("torch.")
        apart, off = setup.apart(setup.run_pass, run_eagerly, few)
        if not max(apart, off) <= TOLERANCE[dtype]:
            raise NotApplied(f"whole_pass: its pass is not that of autograd: gradients are {apart:.1e} apart and losses "
                             f"{off:.1e}; set it to off, and report this")
