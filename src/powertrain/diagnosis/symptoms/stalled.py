"""A run whose process lives and writes no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom, seconds
from powertrain.records.findings import Cure, Finding
from powertrain.training.events import EVENTS_EVERY_S

LEAST_SILENCE_S = 60.0       # below it, a slow disk or a paused machine
PATIENCE = 5.0               # times the longest silence that the run's own settings explain
UNKNOWN_STEP_S = 60.0        # of a run that has not written a step yet, and of which nothing was expected


class Stalled(Symptom):
    """Events are written when logging_steps have passed, and at most every few seconds."""

    name = "stalled"
    rests_on = "fact: the run's lock, and the time of its last event"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        if run.state != "running":
            return
        last = _last_event(run)
        silent_s, usual_s = run.now - last["time"], _longest_silence(run)
        if silent_s <= max(LEAST_SILENCE_S, PATIENCE * usual_s):
            return
        after = f"{last['event']} of step {last['step']:,}" if last.get("step") else f"{last['event']}"
        yield cls.found(
            "critical", f"the run is stalled: its process lives, and has written nothing for {silent_s / 60:,.0f} minutes",
            f"at its pace something is written at least every {seconds(usual_s)}. It waits: for a disk, for memory that is "
            "swapped, or for a debugger or a stop signal",
            [f"the last event: {after}", f"logging_steps={run.recipe.logging_steps}"],
            Cure(f"look at the process; stop it (a kill loses what came after the last checkpoint) and go on with "
                 f"`powertrain train --resume {run.folder}`"), expected="the run goes on")


def _last_event(run: RunRecord) -> Mapping[str, Any]:
    happened = run.history.happened[-1].event
    last = run.history.steps[-1] if run.history.steps else happened
    return last if last["time"] > happened["time"] else happened


def _longest_silence(run: RunRecord) -> float:
    estimate = run.estimate
    step_s = max((step["seconds"] for step in run.steady_steps), default=estimate["step_s"][1] if estimate else UNKNOWN_STEP_S)
    pauses = [happened.event.get("seconds") or 0.0 for happened in run.history.happened
              if happened.event["event"] in ("evaluation", "checkpoint", "sample")]
    return EVENTS_EVERY_S + run.recipe.logging_steps * float(step_s) + max(pauses, default=0.0)
