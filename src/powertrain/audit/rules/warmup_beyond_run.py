"""A warm-up that takes up the run."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import first_set, run_steps, warmup_steps
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

MOST = 0.5                   # of the run; beyond it, most steps are not taken at the rate that was asked for
USUAL = 0.03


class WarmupBeyondRun(Rule):
    name = "warmup_beyond_run"
    rests_on = "fact: the learning rate rises from 0 to the one that is set during the warm-up"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        steps = run_steps(subject, where)
        warming = warmup_steps(subject, steps)
        if steps is None or warming is None or warming <= MOST * steps:
            return
        usual, whole = max(1, round(USUAL * steps)), warming >= steps
        yield cls.found("critical" if whole else "moderate", "the warm-up takes up the run",
                        f"{warming:g} of {steps} steps are warm-up" + (", and the rate that is set is never reached" * whole),
                        first_set(subject, ("training.warmup_ratio", "training.warmup_steps")),
                        subject.settings.get("training.max_steps"), expected=NO_SPEED,
                        cure=Cure(f"Warm up for about {usual} steps", set_to(subject, "training.warmup_steps", usual),
                                  (f"warmup_steps={usual}",)))
