"""Activation checkpointing: keep a block's input and attention, and compute the rest again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.cost.fitting import total_bytes
from powertrain.records import Effect, ModelFacts, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.checkpoint import CheckpointPolicy

    from powertrain.models.decoder import Block
    from powertrain.models.kernels.attention import Attention
    from powertrain.models.model import Rotary, RunBlock

KEPT = ("bmm_attention", "ragged_attention", "_scaled_dot_product_", "_varlen_attn")     # operators that mix tokens


@dataclass(frozen=True)
class CheckpointedBlocks:
    """Runs every n-th block that trains or passes a gradient on under torch's checkpoint, and the others plainly."""

    inner: RunBlock
    every: int
    keep_attention: bool
    recomputes: ClassVar[bool] = True

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor:
        import torch
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

        has_gradient = x.requires_grad or any(parameter.requires_grad for parameter in block.parameters())
        if index % self.every or not torch.is_grad_enabled() or not has_gradient:
            return self.inner(block, index, x, rotary, lengths, attention)
        # attention that is kept draws no dropout mask a second time, and all draws after it would be others
        keep = self.keep_attention and not (block.training and block.config.dropout)
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention) if keep else noop_context_fn
        result: Tensor = checkpoint(self.inner, block, index, x, rotary, lengths, attention, use_reentrant=False,
                                    context_fn=contexts)
        return result


@dataclass(frozen=True)
class ActivationCheckpointing(Technique):
    """Saves the activation memory of every n-th block, at the price of most of its forward pass.

    The same operations run again on the same inputs, with dropout's random state restored, so results keep their bits.
    The result of attention, which costs most per byte, is kept (without dropout). Recomputing stops at the last tensor that
    a gradient needs, before the down projection. Blocks below the lowest trained weight have no backward pass at all.
    """

    every: int = 1
    keep_attention: bool = True

    name = "activation_checkpointing"
    does = "recomputes a block's activations in the backward pass instead of storing them"
    decides_by: ClassVar = {"checkpoint_every": "every", "checkpoint_keeps_attention": "keep_attention"}
    native_only = True
    exactness = Exactness.BITWISE
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "attention", "elementwise"})
    slots = frozenset({"recomputing"})
    source = "Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint, selective and with early stop"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        if run.decided.replayed:
            return cls.refuse(Why.CONFLICT, "cuda_graph records passes, and a recording cannot restore dropout's random state",
                              rival="cuda_graph")
        plain = run.one_example()
        need = run.need(plain)
        shown = f"one example of {plain.block:,} tokens needs {need}"
        if need.is_met:
            return cls.refuse(Why.NOT_NEEDED, f"memory is not short: {shown}", cls(), numbers=need.numbers)
        saving_bytes = need.needed_bytes - total_bytes(run.model, replace(plain, checkpoint_every=1))
        again = _recomputed_share(run.model)
        return cls().on(f"memory is short: {shown}", Effect(
            (1 + 0.7 * again, 1 + again), -saving_bytes,
            basis="formula: a second forward pass, without head and down projections"), numbers=need.numbers)

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        if cls.settings_of(cls.answer(run)) is None:
            return ()
        return None, *(cls(every) for every in (1, 2) if every <= run.model.layers)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, run_block=CheckpointedBlocks(setup.run_block, self.every, self.keep_attention))

    def confirm(self, setup: Setup) -> None:
        found, wanted = setup.runner(CheckpointedBlocks), (self.every, self.keep_attention)
        if found is None or (found.every, found.keep_attention) != wanted:
            raise NotApplied(f"activation_checkpointing: blocks are run by {name_of(setup.run_block)}, not every {self.every} "
                             "recomputed")


def _keep_attention(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep the result of attention; its inputs, queries, keys and values, are recomputed for the backward pass."""
    from torch.utils.checkpoint import CheckpointPolicy

    del context
    name = operator.name().partition("::")[2]
    return CheckpointPolicy.MUST_SAVE if name.startswith(KEPT) else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed_share(model: ModelFacts) -> float:
    """Return the products that are recomputed as a share of a step's: forward, for the inputs, for the trained weights."""
    down = model.layers * model.mlp_width * model.width
    again = model.matmul_parameters - down
    products = 3 if model.adapter_parameters == 0 else 2
    return again / (products * (model.matmul_parameters + model.head_parameters))
