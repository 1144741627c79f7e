"""Room on the disk for the checkpoints that the recipe keeps."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding
from powertrain.run.storing import checkpoint_bytes


class Disk(Check):
    name = "disk"
    rests_on = "formula: 12 bytes per trained weight and checkpoint"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        limit, each = where.prepared.recipe.save_total_limit, checkpoint_bytes(where.prepared)
        free = where.machine.disk_free_bytes
        needed = (limit + 2) * each          # those kept, the best one, and a new one while it is written
        seen = f"{free / 2**20:,.0f} MiB free on the disk of {where.machine.disk}, a checkpoint takes {each / 2**20:,.0f} MiB"
        if free < 2 * each:
            yield cls.says("critical", "the disk has no room for a checkpoint and the model",
                           "what is trained could not be kept", seen=seen,
                           cure="free some space, or put the run on another disk with --output")
        elif free < needed:
            yield cls.says("moderate", f"the disk has no room for {limit} kept checkpoints",
                           "saving would fail later in the run", seen=seen,
                           cure="free some space, or keep fewer", words=("save_total_limit=1",))
        else:
            yield cls.says("good", "the disk has room", f"for {limit} kept checkpoints, the best one and a new one", seen=seen)
