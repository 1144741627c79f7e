"""A run that ended while its loss was still falling: its steps were too few."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.robust import level, median_error, window
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import LEAST_STEPS, Symptom
from powertrain.records.findings import Cure, Finding, Risk
from powertrain.records.timeline import FALLING_SHARE, held_out_trend

LAST_SHARE = 0.2             # of the steps, in which the training loss is looked at where evaluations say nothing


class StillFalling(Symptom):
    name = "still_falling"
    rests_on = "fact: the run's last losses, held out where there are enough"
    gives_way_to = frozenset({"not_finite", "divergence", "nothing_trained", "uniform_loss", "no_progress", "late_plateau",
                              "overfitting"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        if run.state != "finished" or len(run.losses) < LEAST_STEPS or (fall := _fall(run)) is None:
            return
        what, (before_step, before), (last_step, last) = fall
        yield cls.found(
            "low", f"the {what} loss was still falling when the run ended",
            f"it fell by {(before - last) / before:.1%} from step {before_step:,} to {last_step:,}, as the schedule ended: "
            "this is what so many steps made of it, not what the model can learn",
            [f"{what} loss {before:.4g} at step {before_step:,}, {last:.4g} at step {last_step:,}"],
            Cure("train longer; another number of steps has another schedule, so it is a new run",
                 words=(f"max_steps={2 * run.total_steps}",)),
            expected="a lower loss, in twice the time", risk=Risk(accuracy="none"))


def _fall(run: RunRecord) -> tuple[str, tuple[int, float], tuple[int, float]] | None:
    if (held_out := held_out_trend(run.history)) is not None:
        return ("held-out", held_out.all[-2], held_out.all[-1]) if held_out.trend == "falling" else None
    losses, width = run.losses, window(len(run.losses))
    place = round(len(losses) * (1 - LAST_SHARE))
    before, last = level(losses, place, width), level(losses, len(losses), width)
    if before - last <= max(FALLING_SHARE * last, 3 * 2**0.5 * median_error(losses[-width:])):
        return None
    return "training", (run.steps[place - 1]["step"], before), (run.last_step, last)
