"""Steps that were done twice, because a run was killed after its last checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom, seconds, several
from powertrain.records.findings import Cure, Finding

SERIOUS_SHARE = 0.1          # of the run's time
MANY_SESSIONS = 5            # that begin anew: each reads the data, builds the model and warms up


class LostWork(Symptom):
    """The interval between checkpoints that loses least: sqrt(2 x seconds of a checkpoint x seconds between kills).

    Source: Young 1974, A first order approximation to the optimum checkpoint interval.
    """

    name = "lost_work"
    rests_on = "formula: Young 1974"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        history, sessions = run.history, len(run.history.sessions)
        if not history.repeated_steps:
            if sessions >= MANY_SESSIONS:
                yield _many_sessions(run, sessions)
            return
        share = history.repeated_s / (history.wall_s + history.repeated_s)
        every = _best_interval(run)
        yield cls.found(
            "moderate" if share > SERIOUS_SHARE else "low",
            f"{several(history.repeated_steps, 'step')} were done twice",
            f"the run was killed and went on from its last checkpoint in {several(sessions - 1, 'continuation')}; "
            f"{seconds(history.repeated_s)} of {seconds(history.wall_s + history.repeated_s)} were spent again",
            [f"continuations began after steps {', '.join(f'{step:,}' for step in history.sessions[1:])}",
             f"save_steps={run.recipe.save_steps}, {several(len(history.of('checkpoint')), 'checkpoint')}"],
            Cure("save more often", words=(f"save_steps={every}",)) if every else
            Cure("save as often as now: checkpoints cost more than the work that they would save"),
            expected=f"at most {1 / (1 - share):.3g} times as fast", basis="formula: the repeated steps, not repeated")


def _best_interval(run: RunRecord) -> int | None:
    """In steps, if it is shorter than what the run does; None where it is not."""
    saves = [happened.event["seconds"] for happened in run.history.of("checkpoint") if happened.event.get("seconds")]
    if not saves or not run.step_s:
        return max(1, run.last_step // 10) if run.recipe.save_steps == 0 else None
    between_kills_s = (run.history.wall_s + run.history.repeated_s) / max(1, len(run.history.sessions) - 1)
    every = max(1, math.ceil(math.sqrt(2 * median(saves) * between_kills_s) / run.step_s))
    places = [happened.after_step for happened in run.history.of("checkpoint")]
    usual = median(later - earlier for earlier, later in zip([0, *places], places, strict=False))
    return every if every < usual else None


def _many_sessions(run: RunRecord, sessions: int) -> Finding:
    return LostWork.found(
        "low", f"the run was continued {sessions - 1:,} times",
        "no step was done twice, but each session reads the data, builds the model and warms up again, which no event counts",
        [f"continuations began after steps {', '.join(f'{step:,}' for step in run.history.sessions[1:])}"],
        Cure("let it run through where that can be had"), expected="the start-ups are saved")
