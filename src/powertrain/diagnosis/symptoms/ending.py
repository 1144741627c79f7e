"""Symptoms of how a run ended: stalled, failed, killed, out of memory, work done twice, and its own warnings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.run_record import RunRecord, seconds, several
from powertrain.records.event_log import EVENTS_EVERY_S
from powertrain.records.events import (
    CheckpointFailed,
    CheckpointRejected,
    Evaluated,
    Event,
    OutOfMemory,
    RunWarning,
    Sample,
    Saved,
)
from powertrain.records.findings import Cure, Expected, Finding, Severity, finding, rule

LEAST_SILENCE_S = 60.0       # a shorter silence may be a slow disk or a paused machine
PATIENCE = 5.0               # times the longest silence that the run's own settings explain
UNKNOWN_STEP_S = 60.0        # of a run that has no step yet, and whose plan has no estimate
NEARLY_FULL = 0.9            # of the memory that was free: if so much was predicted, the system has probably killed the run
PASS_TECHNIQUES = ("micro_batch", "packing")                 # these set how much is computed at once
UNSAVED = (CheckpointFailed, CheckpointRejected)             # a checkpoint that should be on the disk is missing
NAMED_WARNINGS = 3
SERIOUS_SHARE = 0.1          # of the run's time
MANY_SESSIONS = 5            # each session reads the data, builds the model and warms up again
MIB = 2**20


@rule("fact: the run's lock, and the time of its last event")
def stalled(run: RunRecord) -> Iterator[Finding]:
    """The run's process lives and writes no events any more.

    Events are written when logging_steps have passed, and at most every few seconds.
    """
    if run.state != "running":
        return
    last = _last_event(run)
    silent_s, usual_s = run.now - last.time, _longest_silence(run)
    if silent_s <= max(LEAST_SILENCE_S, PATIENCE * usual_s):
        return
    after = f"{last.kind} of step {last.step:,}" if last.step else last.kind
    yield finding("critical", f"the run is stalled: its process lives, and wrote no event for {silent_s / 60:,.0f} minutes",
                  f"at the run's pace an event is due at least every {seconds(usual_s)}. The process waits for a disk, for "
                  "swapped memory, for a debugger or after a stop signal",
                  f"the last event: {after}", f"logging_steps={run.recipe.logging_steps}",
                  cure=f"look at the process; stop it (a kill loses the steps after the last checkpoint) and continue with "
                       f"`powertrain train --resume {run.folder}`",
                  expected=Expected("the run continues", "none"), numbers={"silent_s": silent_s, "usual_s": usual_s})


def _last_event(run: RunRecord) -> Event:
    happened = run.history.happened[-1].event
    last = run.history.steps[-1] if run.history.steps else happened
    return last if last.time > happened.time else happened


def _longest_silence(run: RunRecord) -> float:
    estimate = run.estimate
    step_s = max((step.seconds for step in run.steady_steps), default=estimate["step_s"][1] if estimate else UNKNOWN_STEP_S)
    pauses = [happened.event.seconds for happened in run.history.happened
              if isinstance(happened.event, (Evaluated, Saved, Sample))]
    return EVENTS_EVERY_S + run.recipe.logging_steps * float(step_s) + max(pauses, default=0.0)


@rule("technique: micro_batch")
def out_of_memory(run: RunRecord) -> Iterator[Finding]:
    """Memory ran out: steps were repeated in smaller passes, or the run ended."""
    warnings = run.history.of(OutOfMemory)
    if run.error.get("kind") == "does_not_fit":
        yield finding("critical", "the run ended because it did not fit the memory",
                      f"after {several(run.last_step, 'step')}"
                      + (f", of which {len(warnings)} had been repeated in smaller passes" if warnings else ""),
                      run.said_at_end, *_predicted_memory(run),
                      cure="keep fewer activations, or train fewer examples at a time",
                      words=("techniques.activation_checkpointing=on", "techniques.micro_batch.examples=1"),
                      expected=Expected("the run fits", "none"))
    elif warnings:
        yield finding("moderate", f"memory ran out {several(len(warnings), 'time')}, and the passes became smaller",
                      "the batch and the updates are the same; smaller passes are slower, and the plan expected the larger "
                      "passes to fit", *(f"step {one.after_step + 1:,}: {one.event.before_tokens:,} tokens in a pass, then "
                                         f"{one.event.after_tokens:,}"
                                         for one in warnings[:3]), *_predicted_memory(run),
                      cure="start with passes that fit; plan.json has them", words=_passes(run),
                      expected=Expected("no step is repeated", "none"), numbers={"times": len(warnings)})


def _passes(run: RunRecord) -> tuple[str, ...]:
    return tuple(f"techniques.{name}.{key}={value}" for name in PASS_TECHNIQUES
                 for key, value in run.techniques.get(name, {}).items() if isinstance(value, int))


def _predicted_memory(run: RunRecord) -> Iterator[str]:
    estimate, free = run.estimate, (run.facts.get("hardware") or {}).get("free_memory_bytes")
    if estimate and free:
        yield (f"predicted {sum(estimate['memory_bytes'].values()) / MIB:,.0f} MiB at the peak, of {free / MIB:,.0f} MiB that "
               "were free")


@rule("fact: the run's end event, or its absence, and its lock", gives_way_to=("not_finite", "out_of_memory"))
def ended_early(run: RunRecord) -> Iterator[Finding]:
    """The run is not finished and does not train: it failed, was stopped or was killed."""
    severity: Severity
    if run.state == "failed":
        severity, title, why = "critical", "the run failed", run.said_at_end or "it wrote no reason"
    elif run.state == "stopped":
        severity, title = "low", f"the run was {run.history.state}"
        why = "the run was asked to stop and saved its work; the learning-rate schedule did not reach its end"
    elif run.state == "killed":
        severity, title, why = "moderate", "the run's process is gone, and wrote no end event", _killed(run)
    else:
        return
    left = run.total_steps - run.last_step
    yield finding(severity, f"{title}, at step {run.last_step:,} of {run.total_steps:,}", why, *_checkpoints(run),
                  cure=f"continue from its last checkpoint: `powertrain train --resume {run.folder}`",
                  expected=Expected(f"the {several(left, 'step')} that are left", "none"), numbers={"steps_left": left})


def _checkpoints(run: RunRecord) -> list[str]:
    saved = [happened.after_step for happened in run.history.of(Saved)]
    lost = run.last_step - (saved[-1] if saved else 0)
    return [f"the last checkpoint is of step {saved[-1]:,}" if saved else "there is no checkpoint",
            f"{several(lost, 'step')} would be repeated" if lost else "no step is lost"]


def _killed(run: RunRecord) -> str:
    free = (run.facts.get("hardware") or {}).get("free_memory_bytes")
    needed = sum((run.estimate or {}).get("memory_bytes", {}).values())
    if free and needed > NEARLY_FULL * free:
        return (f"the system probably killed it for its memory: {needed / MIB:,.0f} MiB were predicted, of "
                f"{free / MIB:,.0f} MiB that were free")
    return ("it was killed from outside (kill -9, the system when memory runs out, a machine that went down), which a run "
            "cannot record")


@rule("formula: Young 1974")
def lost_work(run: RunRecord) -> Iterator[Finding]:
    """Steps were done twice, because the run was killed after its last checkpoint.

    The interval between checkpoints that loses least: sqrt(2 x seconds of a checkpoint x seconds between kills).
    Source: Young 1974, A first order approximation to the optimum checkpoint interval.
    """
    history, sessions = run.history, len(run.history.sessions)
    began = f"continuations began after steps {', '.join(f'{step:,}' for step in history.sessions[1:])}"
    if not history.repeated_steps:
        if sessions >= MANY_SESSIONS:
            yield finding("low", f"the run was continued {sessions - 1:,} times", "no step was done twice, but each session "
                          "reads the data, builds the model and warms up again, which no event counts", began,
                          cure="run it without interruption where possible",
                          expected=Expected("the time of the start-ups is saved", "none"))
        return
    share = history.repeated_s / (history.wall_s + history.repeated_s)
    every = _best_interval(run)
    yield finding("moderate" if share > SERIOUS_SHARE else "low", f"{several(history.repeated_steps, 'step')} were done twice",
                  f"the run was killed and continued from its last checkpoint in {several(sessions - 1, 'continuation')}; "
                  f"{seconds(history.repeated_s)} of {seconds(history.wall_s + history.repeated_s)} were spent again",
                  began, f"save_steps={run.recipe.save_steps}, {several(len(history.of(Saved)), 'checkpoint')}",
                  cure=Cure("save more often", words=(f"save_steps={every}",)) if every else
                       Cure("save as often as now: more checkpoints would cost more time than they save"),
                  expected=Expected(f"at most {1 / (1 - share):.3g} times as fast", "formula: the repeated steps removed"),
                  numbers={"repeated_steps": history.repeated_steps, "repeated_s": history.repeated_s})


def _best_interval(run: RunRecord) -> int | None:
    """Return Young's interval in steps, or None where the run already saves as often."""
    saves = [happened.event.seconds for happened in run.history.of(Saved) if happened.event.seconds]
    if not saves or not run.step_s:
        return max(1, run.last_step // 10) if run.recipe.save_steps == 0 else None
    between_kills_s = (run.history.wall_s + run.history.repeated_s) / max(1, len(run.history.sessions) - 1)
    every = max(1, math.ceil(math.sqrt(2 * median(saves) * between_kills_s) / run.step_s))
    places = [happened.after_step for happened in run.history.of(Saved)]
    usual = median(later - earlier for earlier, later in zip([0, *places], places, strict=False))
    return every if every < usual else None


@rule("fact: the run's warnings")
def warned(run: RunRecord) -> Iterator[Finding]:
    """The run wrote warnings that no other symptom explains."""
    warnings = [one.event for one in run.history.of(RunWarning) if not isinstance(one.event, OutOfMemory)]
    if not warnings:
        return
    messages = [warning.sentence for warning in warnings]
    unsaved = [warning.sentence for warning in warnings if isinstance(warning, UNSAVED)]
    yield finding("moderate" if unsaved else "low",
                  f"the run warned {'once' if len(messages) == 1 else f'{len(messages)} times'}"
                  + (": some files that it should have saved are missing" if unsaved else ""),
                  (unsaved or messages)[0], *messages[:NAMED_WARNINGS],
                  cure="free space on the disk, or make it writable, and save again" if unsaved else "do what the warning says",
                  expected=Expected("the run can continue from where it is" if unsaved else "no warning", "none"))
