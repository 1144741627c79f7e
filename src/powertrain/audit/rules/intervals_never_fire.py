"""Evaluation, logging or checkpoints at intervals that the run does not reach."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import interval_steps, run_steps, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Severity

WHAT = {"eval": "it is never evaluated", "logging": "no loss is ever logged", "save": "nothing is saved before its end"}


class IntervalsNeverFire(Rule):
    name = "intervals_never_fire"
    rests_on = "fact: an interval longer than the run never comes round"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        steps = run_steps(subject, where)
        if steps is None:
            return
        intervals = {what: interval_steps(subject, what, steps) for what in WHAT}
        never = [what for what, every in intervals.items() if every is not None and every > steps
                 and (what != "save" or "training.save_steps" in subject.settings)]
        if never:
            severity: Severity = "low" if never == ["save"] else "moderate"
            tenth = max(1, steps // 10)
            says = "; ".join(f"{WHAT[what]} ({what}_steps={intervals[what]:g})" for what in never)
            yield cls.found(severity, "intervals longer than the run", f"The run has {steps} steps: {says}",
                            *(seen(subject, f"training.{what}_steps") for what in never),
                            subject.settings.get("training.max_steps"), expected=NO_SPEED,
                            cure=Cure(f"Choose intervals below {steps} steps: a tenth of the run is {tenth}", (),
                                      tuple(f"{what}_steps={tenth}" for what in never)))
