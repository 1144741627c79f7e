"""The arithmetic of batches: examples of a step, passes of a step, steps of an epoch, and what is left over."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain import planner
from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding

FEW_STEPS = 20               # of a run: its learning rate hardly comes up before it goes down


class Batch(Check):
    name = "batch"
    rests_on = "documentation: 000, where 3 x 3 is said to keep a batch of 8; features X5, X7, F12"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        prepared, data = where.prepared, where.prepared.facts.data
        batch, steps = data.train_batch_size, prepared.total_steps
        workload = planner.workload_of(prepared.facts, prepared.plan)
        passes, left = workload.micro_batches, batch % workload.micro_batch
        each = f"{passes} pass{'es' if passes > 1 else ''}"
        seen = f"{batch} examples a step in {each}, {prepared.steps_per_epoch:,.3g} steps an epoch"
        if left and workload.packed_tokens is None:
            even = max(size for size in range(1, workload.micro_batch + 1) if batch % size == 0)
            yield cls.says("low", f"the last pass of a step has {left} examples instead of {workload.micro_batch}",
                           "the update is the same, as the loss is divided by the whole step's tokens; but another shape is "
                           "computed at another speed, and compiled blocks run it uncompiled", seen=seen,
                           cure="split the batch evenly", words=(f"techniques.micro_batch.examples={even}",))
        if (over := data.examples % batch) and prepared.steps_per_epoch >= 1 and prepared.recipe.max_steps is None:
            yield cls.says("good", "no example is left out", f"{over} examples are left after an epoch's whole steps, and share"
                           " the next one with those of the next epoch", seen=seen)
        if steps < FEW_STEPS:
            yield cls.says("moderate", f"the run has only {steps} steps", "each step is an update of the weights; so few teach "
                           "little, whatever their size", seen=seen, cure="take a smaller batch or more epochs",
                           words=(f"train_batch_size={max(1, batch * steps // FEW_STEPS)}",))
