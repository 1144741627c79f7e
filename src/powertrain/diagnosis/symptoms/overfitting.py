"""Held-out loss that rises while the training loss falls: the run learns its examples by heart."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.robust import level, median_error, window
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import LEAST_STEPS, Symptom
from powertrain.records.findings import Cure, Finding, Risk
from powertrain.records.timeline import held_out_trend

SERIOUS_SHARE = 0.02         # of the lowest held-out loss: a rise from which the final model is plainly the worse one


class Overfitting(Symptom):
    name = "overfitting"
    rests_on = "fact: the losses of the run's evaluations, over the same text"
    gives_way_to = frozenset({"not_finite", "divergence"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        held_out, losses = held_out_trend(run.history), run.losses
        if held_out is None or held_out.trend != "risen" or len(losses) < LEAST_STEPS:
            return
        (best_step, best), (last_step, last) = held_out.best, held_out.all[-1]
        width = window(len(losses))
        place = next((at for at, step in enumerate(run.steps) if step["step"] > best_step), len(losses))
        then, now = level(losses, place, width), level(losses, len(losses), width)
        if then - now <= 2 * median_error(losses[-width:]):      # the training loss did not fall: that is no overfitting
            return
        epochs = f"{best_step / run.steps_per_epoch:.2g} epochs" if run.steps_per_epoch else f"step {best_step:,}"
        yield cls.found(
            "moderate" if last > best * (1 + SERIOUS_SHARE) else "low",
            f"overfitting since step {best_step:,}: held out {best:.4g} there, {last:.4g} at step {last_step:,}",
            f"meanwhile the training loss fell from {then:.4g} to {now:.4g}: what was learned after {epochs} holds for the "
            "training examples only. The checkpoint with the lowest held-out loss is kept, model/ is the last step's",
            [f"held-out loss at step {step:,}: {loss:.4g}" for step, loss in _telling(held_out.all, best_step)],
            Cure("end it where the held-out loss was lowest, or train on more data", words=(f"max_steps={best_step}",)),
            expected=f"a held-out loss of about {best:.4g} instead of {last:.4g}", basis="measured: this run's evaluations",
            risk=Risk(accuracy="low"))


def _telling(losses: tuple[tuple[int, float], ...], best_step: int) -> list[tuple[int, float]]:
    """The first, the best and the last."""
    return sorted({losses[0], *(one for one in losses if one[0] == best_step), losses[-1]})
