"""A loss that is after the whole run where it was at its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.instability import usual_rate
from powertrain.diagnosis.robust import median_error, window, windows
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom
from powertrain.records.findings import Cure, Finding, Risk

LEAST_GAIN = 0.01            # of the first loss: less is no progress
LEAST = 50                   # steps after the warm-up, which itself may change little
FAR = 10.0                   # times the method's default, up or down: a learning rate from which it is the likely cause
LEARNED = 0.1                # nats: a loss that begins below it leaves little to learn
RAISED = 3.0                 # a learning rate that is no far one is raised by so much


class NoProgress(Symptom):
    name = "no_progress"
    rests_on = "fact: the losses of the run's steps"
    gives_way_to = frozenset({"not_finite", "divergence", "nothing_trained", "uniform_loss"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        losses, width = run.losses, window(len(run.losses))
        if len(losses) < run.warmup_steps + LEAST:
            return
        levels = windows(losses, width)
        gain = levels[0] - levels[-1]
        if levels[0] < LEARNED or gain > max(LEAST_GAIN * levels[0], 3 * median_error(losses[:width])):
            return
        because, cure = _likely(run)
        yield cls.found(
            "critical" if run.recipe.method == "scratch" else "moderate",
            f"the loss has not fallen: {levels[0]:.4g} at the beginning, {levels[-1]:.4g} at the end",
            f"{len(losses):,} steps moved it by {gain:.2g}, and single steps differ more than that. {because}",
            [f"medians of {width} steps each, from {levels[0]:.4g} to {levels[-1]:.4g}; the lowest is {min(levels):.4g}",
             f"learning rate at most {run.recipe.learning_rate:g} (the default of method={run.recipe.method} is "
             f"{usual_rate(run.recipe.method):g})",
             f"gradient norm {median(run.norms):.3g} in the median step, max_grad_norm={run.recipe.max_grad_norm:g}"],
            cure, expected="the loss falls", risk=Risk(accuracy="low"))


def _likely(run: RunRecord) -> tuple[str, Cure]:
    rate, usual = run.recipe.learning_rate, usual_rate(run.recipe.method)
    if rate <= usual / FAR:
        return (f"Likely because the learning rate of {rate:g} is {usual / rate:.0f} times below the default",
                Cure("raise the learning rate", words=(f"learning_rate={usual:.2g}",)))
    if rate >= usual * FAR:
        return (f"Likely because the learning rate of {rate:g} is {rate / usual:.0f} times above the default, so that steps "
                "overshoot", Cure("lower the learning rate", words=(f"learning_rate={usual:.2g}",)))
    if run.recipe.method == "scratch":
        return ("The learning rate is an ordinary one: more likely the data has nothing to learn, or its targets do not follow "
                "from its inputs", Cure("look at the examples (`powertrain data show`)"))
    return ("The learning rate is an ordinary one: the model may know this data already, or need a higher one",
            Cure("raise the learning rate, or look at the examples (`powertrain data show`)",
                 words=(f"learning_rate={rate * RAISED:.2g}",)))
