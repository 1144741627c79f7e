"""TOKENIZERS_PARALLELISM taken for a number of workers."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import number
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "environment.TOKENIZERS_PARALLELISM"
WORKERS = ("training.dataloader_num_workers", "loader.num_workers")


class TokenizersParallelism(Rule):
    name = "tokenizers_parallelism"
    rests_on = "features: F21 (it lets one tokenizer use threads; it starts no loader workers)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        forced = str(subject.value(KEY)).lower() in ("true", "1", "on", "yes")
        workers = next((subject.settings[key] for key in WORKERS if key in subject.settings and number(subject, key)), None)
        if KEY in subject.settings and forced and workers is not None:
            yield cls.found("low", "a tokenizer with threads in forked workers", "Set to true, it keeps threads on after a "
                            "fork, which the library turns them off for: forked loader workers may hang",
                            subject.settings[KEY], workers,
                            expected=UNMEASURED, cure=Cure("Leave it unset: threads are used before the fork, and not after "
                                                           "it"))
