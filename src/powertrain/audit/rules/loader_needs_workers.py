"""Prefetching or lasting workers asked for where there are none."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.resolved import number, seen
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

LOADERS = (("training.dataloader_num_workers", "training.dataloader_prefetch_factor", "training.dataloader_persistent_workers"),
           ("loader.num_workers", "loader.prefetch_factor", "loader.persistent_workers"))


class LoaderNeedsWorkers(Rule):
    name = "loader_needs_workers"
    rests_on = "documentation: torch.utils.data.DataLoader; TrainingArguments._validate_args"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for workers, prefetch, lasting in LOADERS:
            asked = [key for key in (prefetch, lasting) if subject.on(key)]
            if asked and number(subject, workers) == 0:
                names = " and ".join(key.partition(".")[2] for key in asked)
                yield cls.found("critical", "a loader without workers that is asked to prefetch", f"{names}: both speak of "
                                "worker processes, of which there are none, and the loader raises", seen(subject, workers),
                                *(subject.settings[key] for key in asked), expected=Expected("the run starts", "none"),
                                cure=Cure(f"Leave {names} out, or give the loader workers if it waits for data",
                                          tuple(edit for key in asked for edit in removed(subject, key)),
                                          ("techniques.loader=on",)))
