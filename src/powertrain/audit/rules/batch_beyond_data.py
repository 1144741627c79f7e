"""A step that asks for more examples than there are."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import examples_per_step, is_on, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding


class BatchBeyondData(Rule):
    name = "batch_beyond_data"
    rests_on = "fact: an epoch has at most as many examples as the data"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        batch, data = examples_per_step(subject), where.data
        if batch is None or data is None or batch <= data.examples:
            return
        dropped = is_on(subject, "training.dataloader_drop_last") or is_on(subject, "loader.drop_last")
        yield cls.found("critical" if dropped else "moderate", "a step is larger than the data", f"A step takes {batch} "
                        f"examples and there are {data.examples}: " + ("the last, incomplete batch is dropped, and nothing "
                                                          "is left to train on"
                                                          if dropped else "each epoch is one step, of fewer examples"),
                        seen(subject, "training.per_device_train_batch_size"),
                        seen(subject, "training.gradient_accumulation_steps"), expected=NO_SPEED,
                        cure=Cure("Take fewer examples a step", (), (f"train_batch_size={max(1, data.examples // 10)}",)))
