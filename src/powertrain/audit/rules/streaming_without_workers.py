"""Data read and tokenised while training, in the process that trains."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import is_on, number, seen
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.dataloader_num_workers"


class StreamingWithoutWorkers(Rule):
    name = "streaming_without_workers"
    rests_on = "technique: loader; features: X2"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if is_on(subject, "data.streaming") and number(subject, KEY) == 0:
            yield cls.found("moderate", "streamed data without workers", "A streamed dataset is read, decoded and tokenised "
                            "when its batch is asked for; without workers the device waits for all of that in every step",
                            subject.settings["data.streaming"], seen(subject, KEY), expected=UNMEASURED,
                            cure=Cure("Tokenise once and keep the result, or give the loader workers", set_to(subject, KEY, 2),
                                      ("techniques.loader=on",)))
