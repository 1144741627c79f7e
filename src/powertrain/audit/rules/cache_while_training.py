"""A key/value cache kept while training."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import first_set
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEYS = ("training.use_cache", "model.use_cache")


class CacheWhileTraining(Rule):
    name = "cache_while_training"
    rests_on = "features: F13 (it is no matter of loading either); documentation: TrainingArguments.use_cache"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        key = next((key for key in KEYS if subject.value(key) is True), None)
        if key is not None:
            yield cls.found("low", "use_cache is on", "Keys and values of past tokens are kept for generating, which "
                            "training never does; with checkpointing transformers turns it off again, with a warning",
                            first_set(subject, (key,)),
                            expected=Expected("some memory", "none"), cure=Cure("Set use_cache=False",
                                                                                set_to(subject, key, False)))
