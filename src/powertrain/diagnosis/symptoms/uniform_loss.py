"""A loss of ln V: the model holds every token of its vocabulary equally likely."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.instability import lower_rate, usual_rate
from powertrain.diagnosis.robust import window
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom
from powertrain.records.findings import Cure, Finding, Risk

NEAR_SHARE = 0.02            # of ln V: knowing how often tokens occur, the first thing learned, already lowers it by more
LEAST = 50                   # steps after the warm-up: before that a model from scratch may rightly be there


class UniformLoss(Symptom):
    name = "uniform_loss"
    rests_on = "formula: ln V is the cross-entropy of V equally likely tokens"
    gives_way_to = frozenset({"not_finite", "divergence", "nothing_trained"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        vocabulary = (run.facts.get("model") or {}).get("vocabulary")
        if not vocabulary or run.history.start.get("task", "causal") == "span" or \
                len(run.losses) < run.warmup_steps + LEAST:
            return
        uniform, now = math.log(vocabulary), median(run.losses[-window(len(run.losses)):])
        if abs(now - uniform) > NEAR_SHARE * uniform:
            return
        recipe, usual = run.recipe, usual_rate(run.recipe.method)
        low = recipe.learning_rate < usual
        rate = usual if low else lower_rate(recipe)
        yield cls.found(
            "critical", f"the loss is that of guessing: {now:.4g}, where ln({vocabulary:,}) = {uniform:.4g}",
            f"after {len(run.losses):,} steps the model does not even know how often each token occurs, which is learned "
            "first: " + (f"the learning rate of {recipe.learning_rate:g} hardly moves it" if low else
               f"the learning rate of {recipe.learning_rate:g} may throw it about, or inputs and targets do not match"),
            [f"the median loss of the last {window(len(run.losses))} steps is {now:.4g}; the first was {run.losses[0]:.4g}",
             f"learning rate at most {recipe.learning_rate:g} (the default of method={recipe.method} is {usual:g})",
             f"gradient norm {median(run.norms):.3g} in the median step"],
            Cure(f"{'raise' if low else 'lower'} the learning rate; if that changes nothing, look at the examples "
                 "(`powertrain data show`)", words=(f"learning_rate={rate:.2g}",)),
            expected="the loss falls below that of guessing within some ten steps", risk=Risk(accuracy="low"))
