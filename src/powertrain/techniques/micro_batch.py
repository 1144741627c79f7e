"""Micro-batch size: split the optimizer step into forward passes that fit the memory and the caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

CPU_TOKENS = 4096            # 2048 to 4096 were fastest on the CPUs measured
GPU_TOKENS = 32768           # large enough for full-speed products; memory usually decides first
ROOM = 0.5                   # share of the free memory that a pass may count on; what is free may be taken by others
COMPARED = 9                 # examples of the larger pass that memory is compared with


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
        data, hardware = facts.data, facts.hardware
        target_tokens = CPU_TOKENS if hardware.device == "cpu" else GPU_TOKENS
        first_bytes, example_bytes = _memory_of_examples(facts)
        fitting_tokens = max(0, int(ROOM * hardware.free_memory_bytes) - first_bytes) // example_bytes * data.block
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
                        claim=Effect((0.8, 1.02), -example_bytes * (data.train_batch_size - examples),
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


def _memory_of_examples(facts: Facts) -> tuple[int, int]:
    """Peak bytes of a step whose passes have one example, and what each further example of a pass adds: fp32, no scores."""
    # a batch of several passes either way, so that the difference is that of the passes alone
    one = Workload(2 * COMPARED, facts.data.block, micro_batch=1, attention_saves_scores=False)
    several = replace(one, micro_batch=COMPARED)
    first_bytes, several_bytes = (sum(peak_memory(facts.model, workload).values()) for workload in (one, several))
    return first_bytes, max(1, (several_bytes - first_bytes) // (COMPARED - 1))


def _even_split(batch: int, most: int) -> int:
    """The largest divisor of the batch up to `most`, if it is at least half of it: equal passes compile once."""
    divisor = max(size for size in range(1, most + 1) if batch % size == 0)
    return divisor if 2 * divisor >= most else most
