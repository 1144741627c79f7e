"""fp16 steps that were skipped because their gradients overflowed."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord, is_finite
from powertrain.diagnosis.symptoms.base import LEAST_STEPS, Symptom
from powertrain.records.findings import Cure, Finding, Risk

MANY_SHARE = 0.05            # of the steps: a scale that is found and then tried higher every 2,000 steps skips far fewer


class SkippedSteps(Symptom):
    """The loss scale starts at 65,536 and is halved at each overflow, so the first steps are often skipped, rightly."""

    name = "skipped_steps"
    rests_on = "technique: fp16"
    gives_way_to = frozenset({"not_finite"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        if "fp16" not in run.techniques or len(run.steps) < 2 * LEAST_STEPS:
            return
        skipped = [step["step"] for step in run.steps[LEAST_STEPS:] if not is_finite(step["grad_norm"])]
        if len(skipped) <= MANY_SHARE * (len(run.steps) - LEAST_STEPS):
            return
        yield cls.found(
            "moderate", f"{len(skipped):,} steps were skipped: their gradients overflowed in fp16",
            f"{len(skipped) / len(run.steps):.0%} of the run's examples were computed and taught nothing; so many skips, after "
            "the scale has been found, mean that the gradients have no room in fp16",
            [f"gradient norms not finite at steps {', '.join(f'{step:,}' for step in skipped[:5])}"
             + (f" and {len(skipped) - 5:,} more" if len(skipped) > 5 else "")],
            Cure("compute in fp32, or in bf16 where the hardware has it", words=("techniques.fp16=off",)),
            expected="no step is lost; each takes longer without half precision", risk=Risk(accuracy="none"))
