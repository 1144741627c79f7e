"""What is done every so many steps: never, because the run is shorter, or so often that it takes more than 2 % of the run."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.diagnosis.verdict import AFFORDABLE, causes
from powertrain.recipe import in_steps
from powertrain.records.findings import Expected, Finding

MUCH = 0.2                   # of the run


class Intervals(Check):
    name = "intervals"
    rests_on = "features: X11; documentation: 000, 003, 004, intervals by guess"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        recipe, steps = where.prepared.recipe, where.prepared.total_steps
        for key, what in (("eval_steps", "evaluates"), ("save_steps", "saves"), ("logging_steps", "logs")):
            every = in_steps(getattr(recipe, key), where.prepared.steps_per_epoch)
            if every > steps and where.prepared.resolved.origins.get(key) != "default":
                yield cls.says("low", f"{key} never fires", f"the run ends at step {steps:,}, and only {what} then",
                               seen=f"{key}={getattr(recipe, key)}, {steps:,} steps", cure="do it twice in the run",
                               words=(f"{key}={max(1, steps // 2)}",))
        if where.observed is None:
            return
        for cause in causes(where.observed):
            if cause.name in where.observed.between and cause.share > AFFORDABLE:
                part = where.observed.between[cause.name]
                yield cls.says("critical" if cause.share > MUCH else "moderate",
                               f"{cause.name} takes {cause.share:.0%} of the run", f"{AFFORDABLE:.0%} is what it should take "
                               "at most", seen=f"{part.seconds:.3g} s every {part.every:,} steps ({part.key}={part.every})",
                               cure=cause.cure.says, words=cause.cure.words,
                               expected=Expected(f"{cause.predicted:.2f} times as fast", "measured: the probe",
                                                 (1.0, cause.bound)))
