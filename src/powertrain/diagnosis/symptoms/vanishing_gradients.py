"""Gradients that shrank to almost nothing while there was still much to learn."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.instability import lower_rate
from powertrain.diagnosis.robust import window
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import LEAST_STEPS, Symptom
from powertrain.records.findings import Cure, Finding, Risk

SHRUNK = 1e-3                # of the first gradients' norm
LEFT_SHARE = 0.1             # of the first loss: below it, small gradients are what learning ends with


class VanishingGradients(Symptom):
    name = "vanishing_gradients"
    rests_on = "fact: the gradient norms of the run's steps"
    gives_way_to = frozenset({"not_finite", "divergence", "nothing_trained"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        norms, losses = run.norms, run.losses
        if len(norms) < 2 * LEAST_STEPS:
            return
        quarter, width = len(norms) // 4, window(len(losses))
        first, last = median(norms[:quarter]), median(norms[-quarter:])
        if last >= SHRUNK * first or median(losses[-width:]) < LEFT_SHARE * median(losses[:width]):
            return
        place = next(at for at, norm in enumerate(norms) if norm < SHRUNK * first)
        yield cls.found(
            "moderate", f"the gradients vanished: their norm fell from {first:.3g} to {last:.3g}",
            f"the loss is still {median(losses[-width:]):.4g}, of {losses[0]:.4g} at the beginning, so there is much left to "
            "learn, and hardly a gradient to learn it by: parts of the model are saturated, as after too large updates",
            [f"norm {norms[place]:.3g} at step {run.steps[place]['step']:,}, the first below a thousandth of the beginning's",
             f"learning rate at most {run.recipe.learning_rate:g}"],
            Cure("lower the learning rate", words=(f"learning_rate={lower_rate(run.recipe):.2g}",)),
            expected="gradients that keep their size until the loss is low", risk=Risk(accuracy="low"))
