"""More loader processes than there are cores."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import number, processes
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEYS = ("training.dataloader_num_workers", "loader.num_workers")


class WorkersBeyondCores(Rule):
    name = "workers_beyond_cores"
    rests_on = "technique: loader; features: X2 (how long a step waits for data decides, not a rule of thumb)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        hardware = where.hardware
        for key in KEYS if hardware is not None else ():
            assert hardware is not None
            found = number(subject, key)
            workers = int(found or 0) * processes(subject)
            if key in subject.settings and workers > hardware.cores:
                on_cpu = hardware.device == "cpu"
                yield cls.found("moderate", "more loader workers than cores", f"{workers} workers share {hardware.cores} cores"
                                + (" with the training itself, which runs on them" if on_cpu else ""), subject.settings[key],
                                expected=Expected("less waiting: study 2026-11-21_claims, 004-03 and 003-15, found workers "
                                                  "harmful on 2 cores", "study: 2026-11-21_claims") if on_cpu else UNMEASURED,
                                cure=Cure("Start with 0 workers where data is tokenised beforehand, and add while the step "
                                          "waits",
                                          set_to(subject, key, 0 if on_cpu else hardware.cores // processes(subject)),
                                          ("techniques.loader=off",) if on_cpu else ()))
