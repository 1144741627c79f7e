"""Workers that are started again for every epoch."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import is_unread, number
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

PAIRS = (("training.dataloader_num_workers", "training.dataloader_persistent_workers"),
         ("loader.num_workers", "loader.persistent_workers"))


class WorkersStartEachEpoch(Rule):
    name = "workers_start_each_epoch"
    rests_on = "documentation: torch.utils.data.DataLoader (persistent_workers)"
    gives_way_to = frozenset({"workers_for_ready_data", "workers_beyond_cores"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        epochs = number(subject, "training.num_train_epochs")
        for workers, lasting in PAIRS:
            if workers in subject.settings and (number(subject, workers) or 0) >= 1 and not is_unread(subject, lasting) \
                    and not subject.on(lasting) and (epochs or 1) > 1 and (number(subject, "training.max_steps") or -1) < 0:
                written = f"{lasting.partition('.')[2]}{'=True' if subject.script else ': true'}"
                yield cls.found("low", "workers are started anew each epoch", f"{epochs:g} epochs start their worker "
                                f"processes {epochs:g} times, each importing what the dataset needs", subject.settings[workers],
                                subject.settings.get("training.num_train_epochs"), expected=UNMEASURED,
                                cure=Cure(f"Let them live: {written}", set_to(subject, lasting, True)))
