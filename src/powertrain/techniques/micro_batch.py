"""Micro-batch size: split the optimizer step into forward passes that fit the memory and the caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

CPU_TOKENS = 4096            # 2048 to 4096 were fastest on the CPUs measured
GPU_TOKENS = 32768           # large enough for full-speed products; memory usually decides first
BYTES_PER_TOKEN_FLOATS = 40  # saved activations per token and layer, in multiples of the width, fp32 and generous


@dataclass(frozen=True)
class MicroBatch(Technique):
    """The loss is normalised by the tokens of the whole step, so every split gives the same update up to rounding.

    Large passes waste no launch and fill the matrix units; small ones keep activations in the caches and in memory.
    """

    examples: int = 1

    name = "micro_batch"
    exactness = Exactness.ROUNDING
    touches = frozenset({"micro_batch"})
    source = "performance.md section 8 (CPU: 2048-4096 tokens); gradient accumulation with token-weighted loss"

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise ValueError(f"techniques.micro_batch.examples={self.examples} must be at least 1")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        data, model, hardware = facts.data, facts.model, facts.hardware
        target_tokens = CPU_TOKENS if hardware.device == "cpu" else GPU_TOKENS
        token_bytes = 4 * BYTES_PER_TOKEN_FLOATS * model.width * model.layers
        fitting_tokens = hardware.free_memory_bytes // 2 // token_bytes
        wanted = max(1, min(target_tokens, fitting_tokens) // data.block)
        if wanted >= data.train_batch_size:
            return cls.refuse(f"the whole batch of {data.train_batch_size} x {data.block} tokens goes in one pass: "
                              f"at most {target_tokens:,} tokens are wanted, and {fitting_tokens:,} fit",
                              possible=cls(_even_split(data.train_batch_size, -(-data.train_batch_size // 2))))
        examples = _even_split(data.train_batch_size, wanted)
        passes = -(-data.train_batch_size // examples)
        limit = "the memory" if fitting_tokens < target_tokens else "the caches" if hardware.device == "cpu" else "the pass"
        return Proposal(cls(examples),
                        because=f"{passes} passes of {examples} examples ({examples * data.block:,} tokens) suit {limit} "
                                f"better than one of {data.train_batch_size * data.block:,} tokens",
                        claim=Effect((0.8, 1.02), -token_bytes * data.block * (data.train_batch_size - examples),
                                     basis="guess: memory by formula, time not measured yet"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, micro_batch=min(self.examples, setup.train_batch_size))

    def confirm(self, setup: Setup) -> None:
        expected = min(self.examples, setup.train_batch_size)
        found = len(setup.prepare(0)[0].lengths)
        if found != expected or setup.micro_batch != expected:
            raise NotApplied(f"micro_batch: a pass has {found} examples, not {expected}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, micro_batch=min(self.examples, workload.examples))


def _even_split(batch: int, most: int) -> int:
    """The largest divisor of the batch up to `most`, if it is at least half of it: equal passes compile once."""
    divisor = max(size for size in range(1, most + 1) if batch % size == 0)
    return divisor if 2 * divisor >= most else most
