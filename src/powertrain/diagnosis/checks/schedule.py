"""The learning rate over the run: warm-up that does not end, and rates beyond what methods are known to bear."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding, Risk
from powertrain.run.prepare import schedule_of

LONG_WARMUP = 0.3            # of the run
# times the method's default: above that training often diverges ("documentation: 001, training is unstable")
USUAL = {"scratch": 1e-3, "full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
HIGH = 30.0


class Schedule(Check):
    name = "schedule"
    rests_on = "documentation: 001, learning rate and warm-up; formula: training/schedule.py"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        recipe, steps = where.prepared.recipe, where.prepared.total_steps
        asked = round(recipe.warmup_ratio * steps) if recipe.warmup_steps is None else recipe.warmup_steps
        seen = f"{asked:,} steps of warm-up in a run of {steps:,}"
        if asked >= steps:
            yield cls.says("critical", "the warm-up is longer than the run", "the learning rate never reaches "
                           f"{recipe.learning_rate:g}: it ends at {schedule_of(recipe, steps).at(steps - 1):.3g}", seen=seen,
                           cure="warm up for a twentieth of the run", words=(f"warmup_steps={steps // 20}",),
                           expected=Expected("the run learns at the rate that was asked for", "formula: the schedule"))
        elif asked > LONG_WARMUP * steps:
            yield cls.says("moderate", f"{asked / steps:.0%} of the run is warm-up", "most of that is spent below the learning "
                           "rate that was asked for", seen=seen, cure="warm up for a twentieth of the run",
                           words=(f"warmup_steps={steps // 20}",))
        usual = USUAL[recipe.method]
        if recipe.learning_rate > HIGH * usual:
            yield cls.says("moderate", "the learning rate is unusually high", f"{recipe.learning_rate:g} is "
                           f"{recipe.learning_rate / usual:,.0f} times what method={recipe.method} usually takes; the loss may "
                           "rise or stop being finite", seen=f"learning_rate={recipe.learning_rate:g}", cure="start lower",
                           words=(f"learning_rate={usual:g}",), risk=Risk(accuracy="low"))
