"""Time and memory of the run against what its plan expected before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import IDLE_LOAD, Symptom, seconds
from powertrain.records.findings import Cure, Finding

LEAST_STEPS = 10             # timed: the median of fewer says little
OUTSIDE = 1.1                # times the interval's end: nearer, the interval and the clock's noise decide


class UnlikePrediction(Symptom):
    name = "unlike_prediction"
    rests_on = "formula: cost/roofline.py"
    gives_way_to = frozenset({"slow_down", "slow_steps", "out_of_memory"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        estimate, step_s = run.estimate, run.step_s
        if not estimate or step_s is None or len(run.steady_steps) < LEAST_STEPS:
            return
        low, high = estimate["step_s"]
        evidence = [f"{seconds(step_s)} in the median step; the plan expected {seconds(low)} to {seconds(high)} "
                    f"({estimate['basis']})", *_memory(run)]
        if step_s > OUTSIDE * high:
            load = run.history.start.get("load")
            busy = f"the machine had a load of {load:.2g} when it began; " if load and load > IDLE_LOAD else ""
            yield cls.found(
                "low", f"a step took {step_s / high:.2g} times the longest that the plan expected",
                f"{busy}either something held it back, or this kind of work reaches less of the machine than the plan believed",
                evidence, Cure("let `powertrain diagnose` watch some steps, and `powertrain tune` try other plans"),
                expected=f"at most {step_s / low:.3g} times as fast", basis=f"formula: {estimate['basis']}")
        elif step_s >= low / OUTSIDE:
            yield cls.found("good", "time and memory are what the plan expected", "nothing unforeseen holds the steps back",
                            evidence, Cure("nothing"), expected="nothing")


def _memory(run: RunRecord) -> Iterator[str]:
    for happened in run.history.of("memory")[-1:]:
        event = happened.event
        predicted = sum((event.get("predicted") or {}).values())
        if predicted:
            yield (f"{event['allocated_bytes'] / 2**20:,.0f} MiB allocated at the peak; the plan expected "
                   f"{predicted / 2**20:,.0f} MiB")
