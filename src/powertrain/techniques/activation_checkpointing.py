"""Activation checkpointing: keep a block's input and attention, and compute the rest again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from powertrain.cost.fitting import longest_example, planned_room_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, ModelFacts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.models.decoder import Block
    from powertrain.models.kernels.attention import Attention
    from powertrain.models.model import Rotary, RunBlock
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

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
        if index % self.every or not torch.is_grad_enabled() or not _has_gradient(block, x):
            return self.inner(block, index, x, rotary, lengths, attention)
        # attention that is kept draws no dropout mask a second time, and all draws after it would be others
        keep = self.keep_attention and not (block.training and block.config.dropout)
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention) if keep else noop_context_fn
        result: Tensor = checkpoint(self.inner, block, index, x, rotary, lengths, attention, use_reentrant=False,
                                    context_fn=contexts)
        return result


@dataclass(frozen=True)
class ActivationCheckpointing(Technique):
    """Saves the activations of every n-th block at the price of most of its forward pass.

    The same operations run again on the same inputs, with dropout's random state restored, so results keep their bits.
    Not computed again: what attention gave, the dearest thing per byte, is kept (without dropout); computing stops at
    the last tensor that a gradient needs, which comes before the down projection's product; and blocks below the lowest
    weight that is trained have no backward pass at all.
    """

    every: int = 1
    keep_attention: bool = True

    name = "activation_checkpointing"
    does = "recomputes a block's activations in the backward pass instead of storing them"
    exactness = Exactness.BITWISE
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "attention", "elementwise"})
    source = "Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint, selective and with early stop"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"techniques.activation_checkpointing.every={self.every} must be at least 1 (every block)")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        if facts.model.provider != "native":
            return cls.refuse(f"the model is computed by {facts.model.provider}, whose blocks are not ours to run twice")
        if recipe.techniques.get("fused_blocks", "off") != "off":
            return cls.refuse("the recipe asks for fused_blocks, in which it would compute nothing again; saved_activations "
                              "decides what those keep")
        room_bytes, tokens = planned_room_bytes(facts.hardware), longest_example(facts.data)
        plain = Workload(facts.data.train_batch_size, tokens, micro_batch=1)
        needed_bytes = sum(peak_memory(facts.model, plain).values())
        shown = f"one example of {tokens:,} tokens at a time needs {needed_bytes / 2**30:.2f} GiB and " \
                f"{room_bytes / 2**30:.1f} are there"
        if needed_bytes <= room_bytes:
            return cls.refuse(f"{shown}, so recomputing would only cost time", possible=cls())
        saving_bytes = needed_bytes - sum(peak_memory(facts.model, replace(plain, checkpoint_every=1)).values())
        again = _computed_again(facts.model)
        return Proposal(cls(), because=shown,
                        claim=Effect((1 + 0.7 * again, 1 + again), -saving_bytes,
                                     basis="formula: a forward pass once more, without head and down projections"))

    @classmethod
    def variants(cls, facts: Facts, recipe: Recipe) -> Sequence[Technique | None]:
        answer = cls.propose(facts, recipe)
        if isinstance(answer, Refusal) and answer.possible is None:
            return ()
        return None, *(cls(every) for every in (1, 2) if every <= facts.model.layers)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, run_block=CheckpointedBlocks(setup.run_block, self.every, self.keep_attention))

    def confirm(self, setup: Setup) -> None:
        found = setup.run_block
        while not isinstance(found, CheckpointedBlocks) and hasattr(found, "inner"):
            found = found.inner
        wanted = (self.every, self.keep_attention)
        if not isinstance(found, CheckpointedBlocks) or (found.every, found.keep_attention) != wanted:
            raise NotApplied(f"activation_checkpointing: blocks are run by {setup.run_block!r}, not every {self.every} "
                             "recomputed")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, checkpoint_every=self.every, checkpoint_keeps_attention=self.keep_attention)


def _has_gradient(block: nn.Module, x: Tensor) -> bool:
    return x.requires_grad or any(parameter.requires_grad for parameter in block.parameters())


def _keep_attention(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep what attention gave; its inputs, queries, keys and values, are computed again for the backward pass."""
    del context
    name = operator.name().partition("::")[2]
    return CheckpointPolicy.MUST_SAVE if name.startswith(KEPT) else CheckpointPolicy.PREFER_RECOMPUTE


def _computed_again(model: ModelFacts) -> float:
    """Products that are made a second time, as a share of those of a step: forward, for the inputs, for what is trained."""
    down = model.layers * model.mlp_width * model.width
    again = model.matmul_parameters - down
    products = 3 if model.adapter_parameters == 0 else 2
    return again / (products * (model.matmul_parameters + model.head_parameters))
