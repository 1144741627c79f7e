"""Deterministic kernels, which are the slower ones, for a whole training."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

KEY = "training.full_determinism"


class DeterminismForced(Rule):
    name = "determinism_forced"
    rests_on = "documentation: TrainingArguments.full_determinism (\"negatively impacts performance, use only for debugging\")"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) is True:
            yield cls.found("low", "deterministic kernels throughout", "Slower kernels are taken wherever a faster one adds "
                            "in another order; a seed alone gives the same data and weights",
                            subject.settings[KEY], expected=UNMEASURED,
                            cure=Cure("Keep it for debugging", set_to(subject, KEY, False)))
