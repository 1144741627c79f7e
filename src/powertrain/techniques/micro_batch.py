"""Micro-batch size: split the optimizer step into forward passes that fit the memory and the caches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from powertrain.cost import fitting
from powertrain.cost.workload import Workload
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun, Setup, Technique

TRIED = 3                    # sizes, when measuring has to choose


@dataclass(frozen=True)
class MicroBatch(Technique):
    """The loss is normalised by the tokens of the whole step, so every split gives the same update up to rounding.

    Large passes waste no launch and fill the matrix units; small ones keep activations in the caches and in memory.
    """

    examples: int = 1

    name = "micro_batch"
    does = "splits the batch into forward passes that fit memory and caches"
    exactness = Exactness.ROUNDING
    touches = frozenset({"micro_batch"})
    acts_on = EVERYTHING - {"optimizer"}
    slots = frozenset({"passes"})
    source = "gradient accumulation with token-weighted loss; passes of 2,048 to 4,096 tokens were fastest on CPUs"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        data, hardware = run.data, run.hardware
        tokens, batch = fitting.longest_example(data), data.train_batch_size
        target, most = fitting.wanted_tokens(hardware), fitting.fitting_tokens(run.model, run.decided, hardware, tokens)
        suited, shared = fitting.padded_examples(run.model, run.decided, data, hardware), -(-batch // run.least_passes)
        wanted = min(suited, shared)
        shape = f"{batch} x {data.block} tokens" + ("" if data.kind == "blocks" else " on average")
        if run.decided.packs:
            return cls.refuse(Why.NOT_NEEDED, "packing already sets the size of each pass (up to "
                              f"{run.decided.packed_tokens:,} tokens)", cls(_even_split(batch, min(wanted, batch))),
                              rival="packing")
        if wanted >= batch:
            return cls.refuse(Why.NOT_NEEDED, f"the whole batch of {shape} is small enough for one pass (a pass is fastest "
                              f"up to {target:,} tokens; {most:,} fit in memory)",
                              cls(_even_split(batch, -(-batch // 2))), numbers={"fitting_tokens": most})
        examples = _even_split(batch, wanted)
        limit = (f"leaves a share for each of {hardware.processes} processes" if shared < suited else
                 "fits the memory" if most < target else "suits the caches" if hardware.device == "cpu" else "is large enough")
        saved_bytes = fitting.memory_of_examples(run.model, run.decided, tokens)[1] * (batch - examples)
        return cls(examples).on(
            f"{-(-batch // examples)} passes of {examples} example{'s' * (examples > 1)}: a pass of about "
            f"{examples * data.block:,} tokens {limit}, and the whole batch has {batch * data.block:,}",
            Effect((0.8, 1.02), -saved_bytes, basis="guess: memory by formula, time not measured yet", guessed=True),
            numbers={"examples": examples})

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        """Return sizes near the one that the plan would take: the batch halved n times; None is the whole batch in one pass."""
        batch, suit = run.data.train_batch_size, fitting.padded_examples(run.model, run.decided, run.data, run.hardware)
        sizes = [-(-batch // parts) for parts in (2, 4, 8, 16, 32, 64) if parts <= batch]
        near = sorted(sizes, key=lambda size: abs(math.log2(size / suit)))[:TRIED]
        return None, *(cls(size) for size in sorted(near, reverse=True))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, micro_batch=min(self.examples, setup.train_batch_size))

    def confirm(self, setup: Setup) -> None:
        expected = min(self.examples, setup.train_batch_size)
        found = len(setup.prepare(0)[0].lengths) // len(setup.objective.documents(setup.examples[0]))        # a pair has two
        if found != expected or setup.micro_batch != expected:
            raise NotApplied(f"micro_batch: a pass has {found} examples, not {expected}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, micro_batch=min(self.examples, workload.examples), packed_tokens=None)

    def halved(self) -> Self | None:
        return None if self.examples == 1 else replace(self, examples=-(-self.examples // 2))


def _even_split(batch: int, most: int) -> int:
    """Return the largest divisor of the batch up to `most`, or `most` if that is less than half: equal passes compile once."""
    divisor = max(size for size in range(1, most + 1) if batch % size == 0)
    return divisor if 2 * divisor >= most else most
