"""Worker processes that only hand over rows which are ready."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import is_on, number
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEY = "training.dataloader_num_workers"


class WorkersForReadyData(Rule):
    name = "workers_for_ready_data"
    rests_on = "technique: loader; features: X2 (0 is often best where data is tokenised beforehand)"
    gives_way_to = frozenset({"workers_beyond_cores"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework == "trl" and KEY in subject.settings and (number(subject, KEY) or 0) >= 1 \
                and not is_on(subject, "data.streaming"):
            yield cls.found("low", "loader workers for data that is ready", "SFTTrainer tokenises before training; what is "
                            "left for workers is to put rows together, for which each is a process with a copy of the "
                            "dataset's handle and a start at every epoch", subject.settings[KEY],
                            expected=Expected("no effect that could be measured (claim 002-03)",
                                              "study: 2026-11-21_claims"),
                            cure=Cure("Measure first (`powertrain diagnose`): keep 0 while a step waits less than 2 % for data",
                                      set_to(subject, KEY, 0)))
