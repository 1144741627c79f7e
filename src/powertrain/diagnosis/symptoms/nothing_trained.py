"""Gradients of zero: the run computes, and no weight moves."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom
from powertrain.records.findings import Cure, Finding, Risk

ZERO_NORM = 1e-12            # of all gradients together: below it they are zero, or the rounding of zero
LEAST = 5                    # steps: adapters that start at zero may have one or two of them


class NothingTrained(Symptom):
    name = "nothing_trained"
    rests_on = "fact: the gradient norms of the run's steps"
    gives_way_to = frozenset({"not_finite"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        norms = run.norms
        if len(norms) < LEAST or max(norms) > ZERO_NORM:
            return
        tokens = sum(step["tokens"] for step in run.steps)
        adapts = run.recipe.method in ("lora", "qlora")
        yield cls.found(
            "critical", "nothing is trained: every gradient is zero",
            f"the loss is computed from {tokens:,} trained tokens, and does not depend on any weight that is trained"
            + (f" (lora.target_modules={run.recipe.lora.target_modules})" if adapts else ""),
            [f"gradient norm at most {max(norms):.3g} in all of {len(norms):,} steps",
             f"loss {run.losses[0]:.6g} at the first step, {run.losses[-1]:.6g} at the last"],
            Cure("adapt the linears that the scores depend on", words=("lora.target_modules=all-linear",)) if adapts else
            Cure("start from other weights: what lies before the scores passes no gradient back"),
            expected="the loss falls", risk=Risk(difficulty="medium"))
