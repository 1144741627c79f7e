"""Symptoms of how a run ended: stalled, failed, killed, out of memory, work done twice, and its own warnings."""

import math
from collections.abc import Iterator
from statistics import median

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.wording import told
from powertrain.records import events, several
from powertrain.records.event_log import EVENTS_EVERY_S
from powertrain.records.findings import Cure, Finding, rule

LEAST_SILENCE_S = 60.0       # a shorter silence may be a slow disk or a paused machine
PATIENCE = 5.0               # times the longest silence that the run's own settings explain
UNKNOWN_STEP_S = 60.0        # of a run that has no step yet, and whose plan has no estimate
NEARLY_FULL = 0.9            # of the memory that was free: if so much was predicted, the system has probably killed the run
PASS_TECHNIQUES = ("micro_batch", "packing")                 # these set how much is computed at once
UNSAVED = (events.CheckpointFailed, events.CheckpointRejected)      # a checkpoint that should be on the disk is missing
# warnings that have a symptom of their own
EXPLAINED = (events.OutOfMemory, events.Straggler, events.UpdateSkipped, events.Rewound)
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
    last = max([run.history.happened[-1].event, *run.history.steps[-1:]], key=lambda event: event.time)
    silent_s, usual_s = run.now - last.time, _longest_silence(run)
    if silent_s > max(LEAST_SILENCE_S, PATIENCE * usual_s):
        yield told("stalled.silent", silent_s=silent_s, usual_s=usual_s, minutes=silent_s / 60, run=run,
                   last=f"{last.kind} of step {last.step:,}" if last.step else last.kind)


def _longest_silence(run: RunRecord) -> float:
    estimate = run.estimate
    step_s = max((step.seconds for step in run.steady_steps), default=estimate["step_s"][1] if estimate else UNKNOWN_STEP_S)
    pauses = [happened.event.seconds for happened in run.history.happened
              if isinstance(happened.event, (events.Evaluated, events.Saved, events.Sample))]
    return EVENTS_EVERY_S + run.recipe.logging_steps * float(step_s) + max(pauses, default=0.0)


@rule("technique: micro_batch")
def out_of_memory(run: RunRecord) -> Iterator[Finding]:
    """Memory ran out: steps were repeated in smaller passes, or the run ended."""
    warnings = run.history.of(events.OutOfMemory)
    predicted = [f"predicted {run.predicted_bytes / MIB:,.0f} MiB at the peak, of {run.free_bytes / MIB:,.0f} MiB that were "
                 "free"] if run.predicted_bytes and run.free_bytes else []
    if run.end.error.get("kind") == "does_not_fit":
        repeated = f", of which {len(warnings)} had been repeated in smaller passes" if warnings else ""
        yield told("out_of_memory.ended", *predicted, run=run, repeated=repeated)
    elif warnings:
        passes = tuple(f"techniques.{name}.{key}={value}" for name in PASS_TECHNIQUES
                       for key, value in run.techniques.get(name, {}).items() if isinstance(value, int))
        yield told("out_of_memory.repeated", *(f"step {one.after_step + 1:,}: {one.event.before_tokens:,} tokens in a pass, "
                                               f"then {one.event.after_tokens:,}" for one in warnings[:3]), *predicted,
                   cure=Cure("start with passes that fit; plan.json has them", words=passes), times=len(warnings))


@rule("fact: the run's end event, or its absence, and its lock", gives_way_to=("not_finite", "out_of_memory"))
def ended_early(run: RunRecord) -> Iterator[Finding]:
    """The run is not finished and does not train: it failed, was stopped or was killed."""
    case = run.state
    if case not in ("failed", "stopped", "killed"):
        return
    if case == "killed" and run.free_bytes and run.predicted_bytes > NEARLY_FULL * run.free_bytes:
        case = "killed_for_memory"
    saved = [happened.event.step for happened in run.history.of(events.Saved)]
    lost = run.last_step - (saved[-1] if saved else 0)
    yield told(f"ended_early.{case}", f"the last checkpoint is of step {saved[-1]:,}" if saved else "there is no checkpoint",
               f"{several(lost, 'step')} would be repeated" if lost else "no step is lost",
               steps_left=run.total_steps - run.last_step, run=run, said=run.end.message or "the run recorded no reason")


@rule("formula: Young 1974")
def lost_work(run: RunRecord) -> Iterator[Finding]:
    """Steps were done twice, because the run was killed after its last checkpoint.

    The interval between checkpoints that loses least: sqrt(2 x seconds of a checkpoint x seconds between kills).
    Source: Young 1974, A first order approximation to the optimum checkpoint interval.
    """
    history, continuations = run.history, len(run.history.sessions) - 1
    began = ", ".join(f"{step:,}" for step in history.sessions[1:])
    if history.repeated_steps and continuations:         # else the run has rewound: see bad_steps
        spent_s = history.wall_s + history.repeated_s
        share, every = history.repeated_s / spent_s, _best_interval(run)
        yield told("lost_work.rarely_saved" if every else "lost_work.often_saved", began=began, every=every, spent_s=spent_s,
                   severity="moderate" if share > SERIOUS_SHARE else "low", repeated_steps=history.repeated_steps,
                   repeated_s=history.repeated_s, continuations=continuations, most=1 / (1 - share),
                   run=run, checkpoints=len(history.of(events.Saved)))
    elif continuations + 1 >= MANY_SESSIONS:
        yield told("lost_work.many_sessions", began=began, continuations=continuations)


def _best_interval(run: RunRecord) -> int | None:
    """Return Young's interval in steps, or None where the run already saves as often."""
    saves = [happened.event.seconds for happened in run.history.of(events.Saved) if happened.event.seconds]
    if not saves or not run.step_s:
        return max(1, run.last_step // 10) if run.recipe.save_steps == 0 else None
    between_kills_s = (run.history.wall_s + run.history.repeated_s) / max(1, len(run.history.sessions) - 1)
    every = max(1, math.ceil(math.sqrt(2 * median(saves) * between_kills_s) / run.step_s))
    places = [happened.event.step for happened in run.history.of(events.Saved)]
    usual = median(later - earlier for earlier, later in zip([0, *places], places, strict=False))
    return every if every < usual else None


@rule("fact: the run's warnings")
def warned(run: RunRecord) -> Iterator[Finding]:
    """The run wrote warnings that no other symptom explains."""
    warnings = [one.event for one in run.history.of(events.RunWarning) if not isinstance(one.event, EXPLAINED)]
    unsaved = [warning for warning in warnings if isinstance(warning, UNSAVED)]
    if warnings:
        yield told("warned.unsaved" if unsaved else "warned.other", *(one.sentence for one in warnings[:NAMED_WARNINGS]),
                   times="once" if len(warnings) == 1 else f"{len(warnings)} times", first=(unsaved or warnings)[0].sentence)
