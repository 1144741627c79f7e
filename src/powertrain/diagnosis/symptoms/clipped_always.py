"""Gradients that are scaled down in every step: the limit is no limit, it is the size of the step."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import LEAST_STEPS, Symptom
from powertrain.records.findings import Cure, Finding, Risk
from powertrain.records.timeline import quantile

ALWAYS_SHARE = 0.9           # of the steps after the warm-up
FAR = 10.0                   # times the limit: gradients of that size are no ordinary ones


class ClippedAlways(Symptom):
    """Adam divides by the gradients' own size, so one constant factor changes nothing; a factor of each step's own does.

    Then every gradient has the same norm: batches that teach much count as little as those that teach nothing.
    """

    name = "clipped_always"
    rests_on = "fact: the gradient norms of the run's steps"
    gives_way_to = frozenset({"not_finite", "divergence", "uniform_loss", "no_progress"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        limit, norms = run.recipe.max_grad_norm, run.norms[run.warmup_steps:]
        if limit <= 0 or len(norms) < LEAST_STEPS:
            return
        clipped = sum(norm > limit for norm in norms)
        if clipped < ALWAYS_SHARE * len(norms):
            return
        middle, high = median(norms), quantile(norms, 0.9)
        yield cls.found(
            "moderate" if middle > FAR * limit else "low",
            f"{clipped / len(norms):.0%} of the steps had their gradient scaled down to max_grad_norm={limit:g}",
            f"the median norm is {middle:.3g}, {middle / limit:.3g} times the limit: the limit sets the size of every step, "
            "and is no guard against the few that are too large",
            [f"{clipped:,} of {len(norms):,} gradient norms above {limit:g}; nine in ten are below {high:.3g}"],
            Cure("raise the limit to what most steps stay below", words=(f"max_grad_norm={float(f'{high:.2g}'):g}",)),
            expected="steps of a size that follows their gradients", risk=Risk(accuracy="medium"))
