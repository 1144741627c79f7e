"""How long the run takes against what it takes to start it."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding

DAY_S = 86400.0


class RunLength(Check):
    name = "run_length"
    rests_on = "documentation: 003's diagnose tool, training time estimate"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        estimate, recipe = where.prepared.plan.estimate, where.prepared.recipe
        if estimate is None:
            yield cls.says("low", "the plan cannot say how long a step takes", "the speed of this machine is not measured, or "
                           "what the model computes is not counted", seen="no estimate", cure="`powertrain facts --measure`")
            return
        low_s, high_s = (estimate.steps * step_s for step_s in estimate.step_s)
        seen = f"{estimate.steps:,} steps of {estimate.step_s[0]:.3g} to {estimate.step_s[1]:.3g} s, as the plan expects"
        if low_s > DAY_S and not recipe.save_steps:
            yield cls.says("critical", "a run of days saves nothing on its way", f"{low_s / DAY_S:.1f} to {high_s / DAY_S:.1f} "
                           "days of work could be lost", seen=f"{seen}; save_steps=0", cure="save now and then",
                           words=(f"save_steps={max(1, estimate.steps // 100)}",))
        else:
            yield cls.says("good", "the plan knows how long it takes", f"about {(low_s + high_s) / 7200:.2g} hours of training",
                           seen=seen)
