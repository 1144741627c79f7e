"""Memory that ran out: steps taken again in smaller passes, or the end of the run."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import OUT_OF_MEMORY, Symptom, several
from powertrain.records.findings import Cure, Finding

ENDED = ("does not fit the memory", OUT_OF_MEMORY)
PASSES = ("micro_batch", "packing")          # the techniques that set how much is computed at once


class OutOfMemory(Symptom):
    name = "out_of_memory"
    rests_on = "technique: micro_batch"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        warnings = [happened for happened in run.history.of("warning") if OUT_OF_MEMORY in happened.event.get("message", "")]
        ended = run.state == "failed" and any(words in run.said_at_end for words in ENDED)
        if ended:
            yield cls.found(
                "critical", "the run ended because it did not fit the memory",
                f"after {several(run.last_step, 'step')}"
                + (f", of which {len(warnings)} had been taken again in smaller passes" if warnings else ""),
                [run.said_at_end.partition(";")[0], *_memory(run)],
                Cure("keep fewer activations, or train fewer examples at a time",
                     words=("techniques.activation_checkpointing=on", "techniques.micro_batch.examples=1")),
                expected="the run fits")
        elif warnings:
            yield cls.found(
                "moderate", f"memory ran out {several(len(warnings), 'time')}, and the passes became smaller",
                "the batch is the same and so is what is learned; smaller passes are slower, and the plan expected the larger "
                "ones to fit", [*(f"step {one.after_step + 1:,}: {one.event['message'].partition(';')[0]}"
                                  for one in warnings[:3]), *_memory(run)],
                Cure("start with passes that fit, as plan.json has them now", words=_passes(run)),
                expected="no step is begun twice")


def _passes(run: RunRecord) -> tuple[str, ...]:
    return tuple(f"techniques.{name}.{key}={value}" for name in PASSES
                 for key, value in run.techniques.get(name, {}).items() if isinstance(value, int))


def _memory(run: RunRecord) -> Iterator[str]:
    estimate = run.estimate
    free = (run.facts.get("hardware") or {}).get("free_memory_bytes")
    if estimate and free:
        yield (f"predicted {sum(estimate['memory_bytes'].values()) / 2**20:,.0f} MiB at the peak, of "
               f"{free / 2**20:,.0f} MiB that were free")
