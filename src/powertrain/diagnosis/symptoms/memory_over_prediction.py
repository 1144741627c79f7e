"""A step that allocated more than the plan had predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom
from powertrain.records.findings import Cure, Finding

OVER = 1.1                   # times the prediction; its own tests hold it within that
LEAST_BYTES = 64 << 20       # more than predicted: below it, what libraries hold for themselves
FRAGMENTED = 1.3             # reserved over allocated, on a GPU: memory that lies between what is used
TIGHT = 0.8                  # of the memory that was free: from there on it matters


class MemoryOverPrediction(Symptom):
    name = "memory_over_prediction"
    rests_on = "formula: cost/memory.py"
    gives_way_to = frozenset({"out_of_memory"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        events = run.history.of("memory")
        if not events:
            return
        event = events[-1].event
        allocated, predicted = event["allocated_bytes"], sum((event.get("predicted") or {}).values())
        reserved, free = event.get("reserved_bytes", 0), (run.facts.get("hardware") or {}).get("free_memory_bytes", math.inf)
        tight = max(allocated, reserved) > TIGHT * free
        if predicted and allocated > max(OVER * predicted, predicted + LEAST_BYTES):
            yield cls.found(
                "moderate" if tight else "low",
                f"a step allocated {allocated / predicted:.2g} times what was predicted of it",
                "the planner chose micro-batch and checkpointing by the prediction"
                + (", and little memory was left" if tight else "; there was memory enough, so nothing broke"),
                [f"step {event['step']:,}: {allocated / 2**20:,.0f} MiB allocated, {predicted / 2**20:,.0f} MiB predicted"],
                Cure("leave more room: train fewer examples at a time", words=_smaller(run)) if tight else
                Cure("nothing, while there is memory enough"), expected="room for longer examples")
        elif reserved > FRAGMENTED * allocated and tight:
            yield cls.found(
                "low", f"{reserved / allocated:.2g} times what is used is reserved",
                "the allocator keeps pieces that fit nothing, on a device that is nearly full",
                [f"step {event['step']:,}: {allocated / 2**20:,.0f} MiB allocated, {reserved / 2**20:,.0f} MiB reserved"],
                Cure("let the allocator grow its segments", words=("techniques.allocator=on",)),
                expected="memory for larger passes")


def _smaller(run: RunRecord) -> tuple[str, ...]:
    examples = run.techniques.get("micro_batch", {}).get("examples", run.recipe.train_batch_size)
    return (f"techniques.micro_batch.examples={examples // 2}" if examples > 1 else "techniques.activation_checkpointing=on",)
