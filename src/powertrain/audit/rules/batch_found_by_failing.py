"""The batch left to what does not run out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEY = "training.auto_find_batch_size"


class BatchFoundByFailing(Rule):
    name = "batch_found_by_failing"
    rests_on = "documentation: TrainingArguments.auto_find_batch_size; features: X7, F28"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) is True:
            yield cls.found("low", "the batch depends on free memory", "When memory runs out the examples of a pass are "
                            "reduced and the accumulation stays: a step has fewer examples, and the run is another one on "
                            "another machine",
                            subject.settings[KEY], expected=NO_SPEED, risk=Risk("none", "low", "low"),
                            cure=Cure("Set the batch; let accumulation make up for smaller passes", removed(subject, KEY)))
