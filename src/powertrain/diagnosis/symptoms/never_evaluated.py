"""A run about whose learning nothing is known but how well it fits what it was trained on."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom, several
from powertrain.records.findings import Cure, Finding

SEEN_AGAIN = 2.0             # epochs: from here on, learning by heart is possible, and only evaluations show it
EVALUATIONS = 10             # in a run, that show when it began


class NeverEvaluated(Symptom):
    name = "never_evaluated"
    rests_on = "fact: the run's evaluations"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        if run.state != "finished" or not run.steps:
            return
        number = len(run.history.of("evaluation"))
        epochs = run.last_step / run.steps_per_epoch if run.steps_per_epoch else 0.0
        if number == 0:
            yield cls.found(
                "low", "nothing held out was evaluated",
                "the training loss says how well the model fits what it was trained on, and nothing about other text",
                [f"no evaluation in {several(run.last_step, 'step')}; data.validation_share="
                 f"{run.recipe.data.validation_share:g}"],
                Cure("hold some of the data out", words=("data.validation_share=0.05",)), expected="overfitting can be seen")
        elif number == 1 and epochs >= SEEN_AGAIN:
            every = max(1, run.last_step // EVALUATIONS)
            yield cls.found(
                "low", f"evaluated only once, after {epochs:.3g} epochs",
                "every example was seen more than once, so the run may have learned them by heart; one evaluation, at the end, "
                "cannot show when that began, and no checkpoint is known to be the best",
                [f"one evaluation in {several(run.last_step, 'step')} (eval_steps={run.recipe.eval_steps})"],
                Cure("evaluate during the run", words=(f"eval_steps={every}",)), expected="overfitting can be seen")
