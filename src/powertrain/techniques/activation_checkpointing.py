"""Activation checkpointing: keep only the input of a block and compute the rest again in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.models.attention import Attention
    from powertrain.models.decoder import Block, Rotary, RunBlock
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

ROOM = 0.8                   # share of the free memory that a plan may count on


@dataclass(frozen=True)
class CheckpointedBlocks:
    """Runs every n-th block under torch's checkpoint and the others plainly."""

    inner: RunBlock
    every: int

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor:
        if index % self.every or not torch.is_grad_enabled():
            return self.inner(block, index, x, rotary, lengths, attention)
        result: Tensor = checkpoint(self.inner, block, index, x, rotary, lengths, attention, use_reentrant=False)
        return result


@dataclass(frozen=True)
class ActivationCheckpointing(Technique):
    """Saves the activations of every n-th block at the price of its forward pass: up to a third more work.

    The same operations run again on the same inputs, with dropout's random state restored, so results keep their bits.
    It pays only where the memory would not suffice, or where it buys a larger micro-batch that gains more.
    """

    every: int = 1

    name = "activation_checkpointing"
    exactness = Exactness.BITWISE
    touches = frozenset({"run_block"})
    source = "Chen et al. 2016, arXiv:1604.06174; torch.utils.checkpoint(use_reentrant=False)"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"techniques.activation_checkpointing.every={self.every} must be at least 1 (every block)")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        room_bytes = int(ROOM * facts.hardware.free_memory_bytes)
        plain = Workload(facts.data.train_batch_size, facts.data.block, micro_batch=1)
        needed_bytes = sum(peak_memory(facts.model, plain).values())
        if needed_bytes <= room_bytes:
            return cls.refuse(f"one example at a time needs {needed_bytes / 2**30:.2f} GiB and {room_bytes / 2**30:.1f} are "
                              "there, so recomputing would only cost time", possible=cls())
        saving_bytes = needed_bytes - sum(peak_memory(facts.model, replace(plain, checkpoint_every=1)).values())
        return Proposal(cls(), because=f"one example needs {needed_bytes / 2**30:.2f} GiB, {room_bytes / 2**30:.1f} are there",
                        claim=Effect((1.2, 1.35), -saving_bytes, basis="formula: one more forward pass, a third of the work"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, run_block=CheckpointedBlocks(setup.run_block, self.every))

    def confirm(self, setup: Setup) -> None:
        found = setup.run_block
        if not isinstance(found, CheckpointedBlocks) or found.every != self.every:
            raise NotApplied(f"activation_checkpointing: blocks are run by {found!r}, not every {self.every} recomputed")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, checkpoint_every=self.every)
