"""Symptoms of time and memory: slow stretches, slow single steps, and a run unlike its plan's prediction."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from powertrain.diagnosis.curves import (
    LEAST_STEPS,
    WINDOW_STEPS,
    Stretch,
    Timed,
    grown_parts,
    single_slow,
    slow_stretches,
    timed,
)
from powertrain.diagnosis.run_record import IDLE_LOAD, RunRecord, seconds
from powertrain.records.events import Evaluated, Event, Memory, OutOfMemory, Saved, Start
from powertrain.records.findings import Cure, Expected, Finding, finding, rule

WORTH_SHARE = 0.02           # of the steps' time: a smaller loss is not reported
SERIOUS_SHARE = 0.1
MOSTLY = 0.7                 # of the loss, in one part of the step: then that part is the cause
FULL_SHARE = 0.9             # of the machine's memory: near that, a system begins to swap
COMPUTING = ("forward", "backward", "optimizer")
LEAST_SLOW = 4               # slow steps: fewer show no interval
REGULAR_SHARE = 0.7          # of the gaps between slow steps, that are the same
OVER = 1.1                   # times the predicted memory; the prediction's own tests hold it within that
LEAST_BYTES = 64 << 20       # above the prediction: less is held by libraries
FRAGMENTED = 1.3             # reserved over allocated memory, on a GPU
TIGHT = 0.8                  # of the memory that was free: from there on it matters
LEAST_TIMED = 10             # steps: the median of fewer says little
OUTSIDE = 1.1                # times the interval's end: nearer, the interval and the clock's noise decide
UNHINDERED = "formula: the run's steps, all at their usual time"
MIB = 2**20


@rule("fact: the times of the run's steps")
def slow_down(run: RunRecord) -> Iterator[Finding]:
    """Steps took longer from one step on, or for a while."""
    times = timed(run)
    found = [one for one in slow_stretches(times.seconds) if not _is_explained(run, times, one)]
    total_s, lost_s = sum(times.seconds), sum(one.lost_s for one in found)
    if not found or lost_s < WORTH_SHARE * total_s:
        return
    worst = max(found, key=lambda one: one.lost_s)
    because, cure = _why_slow(run, times, worst)
    yield finding("moderate" if lost_s > SERIOUS_SHARE * total_s else "low",
                  f"steps took {worst.slow_s / worst.usual_s:.2g} times as long {_where(times, worst)}",
                  f"{seconds(worst.slow_s)} instead of {seconds(worst.usual_s)}"
                  + (f"; {len(found) - 1} more slow {'stretch' if len(found) == 2 else 'stretches'}" if len(found) > 1 else "")
                  + f": {seconds(lost_s)} of {seconds(total_s)} were lost. {because}", *_beginning(run, times, worst),
                  cure=cure, expected=Expected(f"at most {total_s / (total_s - lost_s):.3g} times as fast", UNHINDERED),
                  numbers={"usual_s": worst.usual_s, "slow_s": worst.slow_s, "lost_s": lost_s})


def _where(times: Timed, one: Stretch) -> str:
    first, last = times.steps[one.first].step, times.steps[one.until - 1].step
    if one.until == len(times.steps):
        return f"from step {first:,} on"
    return f"until step {last:,}" if one.first == 0 else f"between steps {first:,} and {last:,}"


def _is_explained(run: RunRecord, times: Timed, one: Stretch) -> bool:
    """Return whether memory ran out there: smaller passes are slower, and the symptom out_of_memory reports them."""
    first, before = times.steps[one.first].step, times.steps[max(0, one.first - 2 * WINDOW_STEPS)].step
    return any(before <= warning.after_step + 1 <= first + WINDOW_STEPS for warning in run.history.of(OutOfMemory))


def _growth(times: Timed, one: Stretch) -> dict[str, tuple[float, float]]:
    outside = (*times.steps[:one.first], *times.steps[one.until:])
    return grown_parts(times.steps[one.first:one.until], outside) if outside else {}


def _beginning(run: RunRecord, times: Timed, one: Stretch) -> Iterator[str]:
    first, before = times.steps[one.first].step, times.steps[one.first - 1].step if one.first else 0
    yield f"it began {'at once' if one.sudden else 'slowly'}, about step {first:,}" if one.first else "slow from the start"
    for part, (elsewhere, within) in _growth(times, one).items():
        if within > elsewhere * 1.05:
            yield f"{part}: {seconds(elsewhere)} elsewhere, {seconds(within)} there"
    # a session that began between these steps, and the load of the machine then
    for happened in run.history.of(Start):
        began, load = happened.event.step, happened.event.load
        if load is not None and before - WINDOW_STEPS <= began <= first + WINDOW_STEPS and (began or load > IDLE_LOAD):
            yield f"a session began after step {began:,}, with a load of {load:.2g} on the machine"


def _why_slow(run: RunRecord, times: Timed, one: Stretch) -> tuple[str, Cure]:
    growth, lost = _growth(times, one), one.slow_s - one.usual_s
    if growth:
        part, (before, within) = next(iter(growth.items()))
        if part in ("data", "copy") and within - before > MOSTLY * lost:
            return ("The wait for data grew: its source became slower, or was no longer in the disk's cache",
                    Cure("let threads make batches ahead", words=("techniques.loader=on",)))
    machine_bytes = (run.facts.get("hardware") or {}).get("memory_bytes") or 0
    peak_bytes = (run.history.ends.peak_memory_bytes if run.history.ends else None) or 0
    if machine_bytes and peak_bytes > FULL_SHARE * machine_bytes:
        return (f"The process held {peak_bytes / machine_bytes:.0%} of the memory, so the system may have swapped",
                Cure("use less memory", words=("techniques.activation_checkpointing=on",)))
    if _evenly(growth):
        return ("Forward, backward and update grew alike, so the machine itself was slower: another process, or a clock rate "
                "lowered by heat or power", Cure("look for other processes (`powertrain diagnose` watches the machine), and at "
                                                 "the machine's temperature"))
    grew = next(iter(growth), None)
    return (f"It was mostly {grew}" if grew else "The parts of the steps were not recorded",
            Cure("look for other processes at that time; `powertrain diagnose` watches the machine"))


def _evenly(growth: dict[str, tuple[float, float]]) -> bool:
    ratios: Sequence[float] = [growth[part][1] / growth[part][0] for part in COMPUTING if growth.get(part, (0.0,))[0] > 0]
    return len(ratios) > 1 and min(ratios) > 1.1 and max(ratios) < 1.5 * min(ratios)


@rule("fact: the times of the run's steps")
def slow_steps(run: RunRecord) -> Iterator[Finding]:
    """Single steps took far longer than those around them, at an interval or at random.

    Where blocks are compiled, steps that compile again are slow too: the verdict counts those as recompilation.
    """
    times = timed(run)
    found = {} if "torch_compile" in run.techniques else _single_slow(times)
    total_s, lost_s = sum(times.seconds), sum(found.values())
    if len(found) < LEAST_SLOW or lost_s < WORTH_SHARE * total_s:
        return
    numbers = [times.steps[place].step for place in found]
    every = _interval(numbers)
    because, cure = _why_slow_steps(run, times, found, numbers, every)
    named = ", ".join(f"{number:,}" for number in numbers[:6]) + (", ..." if len(numbers) > 6 else "")
    yield finding("moderate" if lost_s > SERIOUS_SHARE * total_s else "low",
                  f"every {every:,} steps one is slow" if every else f"{len(found):,} single steps were slow",
                  f"together they took {seconds(lost_s)} more than those around them, {lost_s / total_s:.0%} of all steps. "
                  f"{because}", f"slow steps: {named}", cure=cure,
                  expected=Expected(f"at most {total_s / (total_s - lost_s):.3g} times as fast", UNHINDERED),
                  numbers={"steps": len(found), "every": every, "lost_s": lost_s})


def _single_slow(times: Timed) -> dict[int, float]:
    """Return place -> seconds lost, without the steps in slow stretches, which slow_down reports."""
    if len(times.steps) < LEAST_STEPS:
        return {}
    within = {place for one in slow_stretches(times.seconds) for place in range(one.first, one.until)}
    return {place: lost_s for place, lost_s in single_slow(times).items() if place not in within}


def _interval(numbers: Sequence[int]) -> int:
    """Return the steps between one and the next, where most gaps are the same; else 0."""
    gaps = Counter(later - earlier for earlier, later in itertools.pairwise(numbers))
    (gap, times), = gaps.most_common(1)
    return gap if gap > 1 and times >= REGULAR_SHARE * gaps.total() else 0


def _why_slow_steps(run: RunRecord, times: Timed, found: dict[int, float], numbers: Sequence[int],
                    every: int) -> tuple[str, Cure]:
    intervals: tuple[tuple[type[Event], str], ...] = ((Evaluated, "eval_steps"), (Saved, "save_steps"))
    for kind, key in intervals:
        after = {happened.after_step + 1 for happened in run.history.of(kind)}
        if sum(number in after for number in numbers) >= MOSTLY * len(numbers):
            interval = max(1, every or round(run.last_step / len(numbers)))
            return (f"Each comes after {'an' if kind is Evaluated else 'a'} {kind.kind}, which leaves caches and disk busy",
                    Cure(f"do it less often ({key})", words=(f"{key}={2 * interval}",)))
    waiting = sum(times.steps[place].parts.get("data", 0.0) for place in found)
    if waiting > MOSTLY * sum(found.values()):
        again = run.steps_per_epoch and every and abs(every - run.steps_per_epoch) <= 1
        return ("They wait for data" + (", once an epoch" if again else ""),
                Cure("let threads make batches ahead", words=("techniques.loader=on",)))
    if every and every == run.recipe.logging_steps:
        return ("That is the interval of logging_steps, at which the run reads and writes its events",
                Cure("log less often", words=(f"logging_steps={10 * every}",)))
    return ("The run does nothing at that interval; another process on the machine may" if every else
            "They come at no interval; another process on the machine may be the cause",
            Cure("look for other processes; `powertrain diagnose` watches the machine"))


@rule("formula: cost/memory.py", gives_way_to=("out_of_memory",))
def memory_over_prediction(run: RunRecord) -> Iterator[Finding]:
    """A step allocated more memory than the plan had predicted, or a full GPU reserved much more than it used."""
    events = run.history.of(Memory)
    if not events:
        return
    event = events[-1].event
    allocated, predicted = event.allocated_bytes, sum(event.predicted.values())
    reserved, free = event.reserved_bytes, (run.facts.get("hardware") or {}).get("free_memory_bytes", math.inf)
    tight = max(allocated, reserved) > TIGHT * free
    seen = f"step {event.step:,}: {allocated / MIB:,.0f} MiB allocated, "
    numbers = {"allocated_bytes": allocated, "predicted_bytes": predicted, "reserved_bytes": reserved}
    if predicted and allocated > max(OVER * predicted, predicted + LEAST_BYTES):
        yield finding("moderate" if tight else "low",
                      f"a step allocated {allocated / predicted:.2g} times the predicted memory",
                      "the planner chose micro-batch and checkpointing by the prediction"
                      + (", and little memory was left" if tight else "; enough memory was free"),
                      f"{seen}{predicted / MIB:,.0f} MiB predicted", numbers=numbers,
                      cure=Cure("leave more room: train fewer examples at a time", words=_smaller(run)) if tight else
                           Cure("no change is needed while enough memory is free"),
                      expected=Expected("room for longer examples", "none"))
    elif reserved > FRAGMENTED * allocated and tight:
        yield finding("low", f"the allocator reserves {reserved / allocated:.2g} times the memory in use",
                      "the allocator keeps pieces that fit no tensor, on a device that is nearly full",
                      f"{seen}{reserved / MIB:,.0f} MiB reserved", cure="let the allocator grow its segments",
                      words=("techniques.allocator=on",), numbers=numbers,
                      expected=Expected("memory for larger passes", "none"))


def _smaller(run: RunRecord) -> tuple[str, ...]:
    examples = run.techniques.get("micro_batch", {}).get("examples", run.recipe.train_batch_size)
    return (f"techniques.micro_batch.examples={examples // 2}" if examples > 1 else "techniques.activation_checkpointing=on",)


@rule("formula: cost/roofline.py", gives_way_to=("slow_down", "slow_steps", "out_of_memory"))
def unlike_prediction(run: RunRecord) -> Iterator[Finding]:
    """The time of a step against the plan's prediction."""
    estimate, step_s = run.estimate, run.step_s
    if not estimate or step_s is None or len(run.steady_steps) < LEAST_TIMED:
        return
    low, high = estimate["step_s"]
    evidence = [f"{seconds(step_s)} in the median step; the plan predicted {seconds(low)} to {seconds(high)} "
                f"({estimate['basis']})", *_peak(run)]
    if step_s > OUTSIDE * high:
        load = run.history.start.load
        loaded = f"the machine had a load of {load:.2g} when the run began; " if load and load > IDLE_LOAD else ""
        yield finding("low", f"a step took {step_s / high:.2g} times the longest time that the plan predicted",
                      f"{loaded}either something held the steps back, or this kind of work reaches less of the machine's speed "
                      "than the plan assumed", *evidence, numbers={"step_s": step_s, "predicted_s": high},
                      cure="watch some steps with `powertrain diagnose`, and try other plans with `powertrain tune`",
                      expected=Expected(f"at most {step_s / low:.3g} times as fast", f"formula: {estimate['basis']}"))
    elif step_s >= low / OUTSIDE:
        yield finding("good", "time and memory match the plan's prediction", "nothing unforeseen holds the steps back",
                      *evidence, expected=Expected("no change", "none"))


def _peak(run: RunRecord) -> Iterator[str]:
    for happened in run.history.of(Memory)[-1:]:
        predicted = sum(happened.event.predicted.values())
        if predicted:
            yield (f"{happened.event.allocated_bytes / MIB:,.0f} MiB allocated at the peak; the plan predicted "
                   f"{predicted / MIB:,.0f} MiB")
