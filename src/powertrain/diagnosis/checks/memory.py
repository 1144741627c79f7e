"""Whether a step fits the memory, and what would make it."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding
from powertrain.run.fits import needed_bytes, room_bytes, savings_of

TIGHT = 0.9                  # of what is free: others may take some, and the longest batch is still to come
SWAPPED = 1 << 28            # bytes of swap in use, from which the machine is likely to have been short of memory


class Memory(Check):
    name = "memory"
    rests_on = "formula: the simulated allocator of cost/memory.py"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        prepared = where.prepared
        if prepared.facts.model.provider == "native":
            needed, room = needed_bytes(prepared.facts, prepared.plan), room_bytes(prepared.facts)
            seen = f"a step needs {needed / 2**30:.2f} GiB at its peak, and {room / 2**30:.2f} GiB are free for it"
            if needed > TIGHT * room:
                saving = next((saving for saving in savings_of(prepared) if saving.enough), None)
                yield cls.says("critical" if needed > room else "moderate",
                               "a step does not fit the memory" if needed > room else "a step fits the memory barely",
                               "training would end for lack of memory, or the machine would swap", seen=seen,
                               cure="free some memory" if saving is None else f"save {saving.bytes / 2**30:.2f} GiB",
                               words=() if saving is None else tuple(saving.words.split()),
                               expected=Expected("the step fits", "formula: simulated allocator"))
            else:
                yield cls.says("good", "a step fits the memory", "its peak is below what is free", seen=seen)
        if where.machine.swap_used_bytes > SWAPPED:
            yield cls.says("low", "the machine has swapped", "what is swapped out comes back from a disk",
                           seen=f"{where.machine.swap_used_bytes / 2**30:.2f} GiB of swap are in use",
                           cure="end what holds memory it does not use")
