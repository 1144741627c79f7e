"""Other processes that compute: they take cores, and every measurement of speed is theirs too."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding, Severity

IDLE, FULL = 0.25, 0.75      # processes that want a core, per core: below the one nobody is disturbed


class Busy(Check):
    name = "busy"
    rests_on = "fact: the load average of the last minute"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        load, cores = where.machine.load, where.prepared.facts.hardware.cores
        seen = f"load {load:.1f} on {cores} core{'s' if cores > 1 else ''}"
        on_cpu = where.prepared.facts.hardware.device == "cpu"
        if load > IDLE * cores:
            severity: Severity = "moderate" if on_cpu and load > FULL * cores else "low"
            yield cls.says(severity, "other processes compute", "they take cores from the run" if on_cpu else
                           "the host prepares batches and starts kernels with what they leave", seen=seen,
                           cure="end them, or wait for them; `top` shows which")
        else:
            yield cls.says("good", "the machine is idle", "nobody takes cores from the run", seen=seen)
