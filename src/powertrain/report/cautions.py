"""What a reader should distrust in a run, with the numbers; the most important first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from powertrain.records.events import Evaluated, RunWarning
from powertrain.records.plan import is_guess
from powertrain.records.timeline import OTHER, History, estimate_of, quantile, steady
from powertrain.report.figures import count, duration
from powertrain.report.page import several
from powertrain.report.run_figures import still_falling

MOST = 5
UNSTEADY = 0.3               # spread of eight steps in ten over the median, where all steps have as many tokens
BUSY = 0.75                  # load of the machine, of the minute before, from which something else was at work
LARGE_SHARE = 0.1            # of the wall time, for what is not training


def of_run(history: History, plan: Mapping[str, Any]) -> list[str]:
    found = [*_unfinished(history), *_not_finite(history), *_lost(history), *_time(history), *_learning(history),
             *_load(history), *_speed(history, plan), *_always(plan)]
    return found[:MOST]


def _unfinished(history: History) -> Iterator[str]:
    if history.ends and history.ends.reason == "failed":
        yield f"The run failed: {history.ends.message or 'no reason was written'}."
    elif history.state != "finished":
        done = history.steps[-1].step if history.steps else 0
        why = history.state or "no end was written: the run is still going, or was killed"
        yield (f"The run is not finished: {done:,} of {history.start.total_steps:,} steps; {why}. "
               "The learning-rate schedule is not finished either.")


def _not_finite(history: History) -> Iterator[str]:
    broken = [step.step for step in history.steps
              if not all(value is not None and math.isfinite(value) for value in (step.loss, step.grad_norm))]
    if broken:
        yield (f"A loss or gradient norm is not finite in {several(len(broken), 'step')}, first in step {broken[0]:,}; the "
               "curves have gaps there.")
    warnings = history.of(RunWarning)
    if warnings:
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        yield f"The run warned: {warnings[0].event.sentence}{more}."


def _lost(history: History) -> Iterator[str]:
    if history.repeated_steps:
        yield (f"{several(history.repeated_steps, 'step')} ({duration(history.repeated_s)}) were lost when the run was "
               "killed, and repeated from the checkpoint; times and curves here count them once.")
    if len(history.sessions) > 1:
        yield (f"The run was continued {several(len(history.sessions) - 1, 'time')}; times "
               "here do not include the pauses and the start-up.")


def _time(history: History) -> Iterator[str]:
    parts, wall_s = history.parts, history.wall_s
    if not wall_s:
        return
    if parts.get(OTHER, 0.0) > LARGE_SHARE * wall_s:
        yield f"{parts[OTHER] / wall_s:.0%} of the wall time belongs to no part of a step (other)."
    if parts.get("data wait", 0.0) > LARGE_SHARE * wall_s:
        yield f"{parts['data wait'] / wall_s:.0%} of the wall time went into waiting for data."
    beside = sum(parts.get(part, 0.0) for part in ("evaluation", "samples", "checkpoint"))
    if beside > LARGE_SHARE * wall_s:
        yield (f"{beside / wall_s:.0%} of the wall time went into evaluating, sampling and saving; tokens/s count "
               "the steps only.")
    if history.overrun_s > 0.01 * wall_s:
        yield (f"The parts add up to {duration(history.overrun_s)} more than the measured wall time; the report shows "
               "their sum.")


def _learning(history: History) -> Iterator[str]:
    if (trend := still_falling(history)) is not None:
        yield trend
    if history.steps and not history.of(Evaluated):
        yield "No held-out text was evaluated, so the report cannot say how well the model does on new text."


def _speed(history: History, plan: Mapping[str, Any]) -> Iterator[str]:
    places = steady(history)
    if len(places) < 10:
        yield f"Only {several(len(places), 'step')} could be timed: too few to give a speed."
        return
    found = [history.speeds[place] or 0.0 for place in places]
    low, middle, high = (quantile(found, share) for share in (0.1, 0.5, 0.9))
    even = len({history.steps[place].real_tokens for place in places}) == 1
    if (high - low) / middle > UNSTEADY:
        why = "other processes were busy, or the clock rate changed" if even else \
            "steps have different numbers of tokens, and other processes may have been busy"
        yield f"The speed varied: 80% of the steps lie between {count(low)} and {count(high)} tokens/s ({why})."
    estimate = estimate_of(history, plan)
    if estimate and not estimate["step_s"][0] <= quantile([history.steps[place].seconds for place in places], 0.5) \
            <= estimate["step_s"][1]:
        yield "The measured step time lies outside the interval that the plan expected."


def _load(history: History) -> Iterator[str]:
    load = history.start.load
    if load is not None and load > BUSY:
        yield f"The machine was not idle when the run began: its load over the last minute was {load:.2g}."


def _always(plan: Mapping[str, Any]) -> Iterator[str]:
    steps = plan.get("steps") or []
    guessed = [step["technique"] for step in steps if is_guess(step["claim"])]
    if guessed:
        yield (f"{len(guessed)} of the {len(steps)} techniques have a guessed gain ({', '.join(guessed)}); `powertrain ablate` "
               "measures their gain.")
    yield "This is one run with one seed; another seed gives other losses."
    yield "Speed was measured once, on this machine; compare only runs from the same machine."
