"""Symptoms of time and memory: slow stretches, slow single steps, and a run unlike its plan's prediction."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from powertrain.diagnosis import curves
from powertrain.diagnosis.run_record import IDLE_LOAD, RunRecord
from powertrain.diagnosis.wording import seconds, told
from powertrain.records.events import Evaluated, Event, Memory, OutOfMemory, Saved, Start
from powertrain.records.findings import Finding, rule

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
MIB = 2**20


@rule("fact: the times of the run's steps")
def slow_down(run: RunRecord) -> Iterator[Finding]:
    """Steps took longer from one step on, or for a while."""
    times = curves.timed(run)
    found = [one for one in curves.slow_stretches(times.seconds) if not _is_explained(run, times, one)]
    total_s, lost_s = sum(times.seconds), sum(one.lost_s for one in found)
    if not found or lost_s < WORTH_SHARE * total_s:
        return
    worst = max(found, key=lambda one: one.lost_s)
    growth, more = curves.grown_parts(times, worst), len(found) - 1
    yield told(f"slow_down.{_why_slow(run, growth, worst)}", *_beginning(run, times, worst),
               severity="moderate" if lost_s > SERIOUS_SHARE * total_s else "low", times=worst.slow_s / worst.usual_s,
               where=_where(times, worst), usual_s=worst.usual_s, slow_s=worst.slow_s, lost_s=lost_s, total_s=total_s,
               others=f"; {more} more slow {'stretch' if more == 1 else 'stretches'}" if more else "",
               part=next(iter(growth), ""), memory_share=run.memory_share, most=total_s / (total_s - lost_s))


def _where(times: curves.Timed, one: curves.Stretch) -> str:
    first, last = times.steps[one.first].step, times.steps[one.until - 1].step
    if one.until == len(times.steps):
        return f"from step {first:,} on"
    return f"until step {last:,}" if one.first == 0 else f"between steps {first:,} and {last:,}"


def _is_explained(run: RunRecord, times: curves.Timed, one: curves.Stretch) -> bool:
    """Return whether memory ran out there: smaller passes are slower, and the symptom out_of_memory reports them."""
    first, before = times.steps[one.first].step, times.steps[max(0, one.first - 2 * curves.WINDOW_STEPS)].step
    return any(before <= warning.after_step + 1 <= first + curves.WINDOW_STEPS for warning in run.history.of(OutOfMemory))


def _beginning(run: RunRecord, times: curves.Timed, one: curves.Stretch) -> Iterator[str]:
    first, before = times.steps[one.first].step, times.steps[one.first - 1].step if one.first else 0
    yield f"it began {'at once' if one.sudden else 'slowly'}, about step {first:,}" if one.first else "slow from the start"
    for part, (elsewhere, within) in curves.grown_parts(times, one).items():
        if within > elsewhere * 1.05:
            yield f"{part}: {seconds(elsewhere)} elsewhere, {seconds(within)} there"
    # a session that began between these steps, and the load of the machine then
    for happened in run.history.of(Start):
        began, load = happened.event.step, happened.event.load
        near = before - curves.WINDOW_STEPS <= began <= first + curves.WINDOW_STEPS
        if load is not None and near and (began or load > IDLE_LOAD):
            yield f"a session began after step {began:,}, with a load of {load:.2g} on the machine"


def _why_slow(run: RunRecord, growth: dict[str, tuple[float, float]], one: curves.Stretch) -> str:
    """Return the likely cause: the case of slow_down in symptoms.toml."""
    for part, (before, within) in list(growth.items())[:1]:
        if part in ("data", "copy") and within - before > MOSTLY * (one.slow_s - one.usual_s):
            return "data"
    if run.memory_share > FULL_SHARE:
        return "full_memory"
    return "machine" if _evenly(growth) else "one_part" if growth else "unknown"


def _evenly(growth: dict[str, tuple[float, float]]) -> bool:
    ratios: Sequence[float] = [growth[part][1] / growth[part][0] for part in COMPUTING if growth.get(part, (0.0,))[0] > 0]
    return len(ratios) > 1 and min(ratios) > 1.1 and max(ratios) < 1.5 * min(ratios)


@rule("fact: the times of the run's steps")
def slow_steps(run: RunRecord) -> Iterator[Finding]:
    """Single steps took far longer than those around them, at an interval or at random.

    Steps in slow stretches are left to slow_down. Where blocks are compiled, steps that compile again are slow too: the verdict
    counts those as recompilation.
    """
    times = curves.timed(run)
    found = {} if "torch_compile" in run.techniques else curves.single_slow(times)
    total_s, lost_s = sum(times.seconds), sum(found.values())
    if len(found) < LEAST_SLOW or lost_s < WORTH_SHARE * total_s:
        return
    numbers = [times.steps[place].step for place in found]
    every = _interval(numbers)
    case, interval_key = _why_slow_steps(run, times, found, numbers, every)
    yield told(f"slow_steps.{case}", severity="moderate" if lost_s > SERIOUS_SHARE * total_s else "low", steps=len(found),
               what=f"every {every:,} steps one is slow" if every else f"{len(found):,} single steps were slow", every=every,
               lost_s=lost_s, share=lost_s / total_s, most=total_s / (total_s - lost_s), key=interval_key, log_every=10 * every,
               rarer=2 * max(1, every or round(run.last_step / len(numbers))),
               places=", ".join(f"{number:,}" for number in numbers[:6]) + (", ..." if len(numbers) > 6 else ""))


def _interval(numbers: Sequence[int]) -> int:
    """Return the steps between one and the next, where most gaps are the same; else 0."""
    gaps = Counter(later - earlier for earlier, later in itertools.pairwise(numbers))
    (gap, times), = gaps.most_common(1)
    return gap if gap > 1 and times >= REGULAR_SHARE * gaps.total() else 0


def _why_slow_steps(run: RunRecord, times: curves.Timed, found: dict[int, float], numbers: Sequence[int],
                    every: int) -> tuple[str, str]:
    """Return the likely cause, a case of slow_steps in symptoms.toml, and the key of the interval that causes it."""
    pauses: tuple[tuple[type[Event], str, str], ...] = ((Evaluated, "evaluation", "eval_steps"),
                                                        (Saved, "checkpoint", "save_steps"))
    for kind, case, key in pauses:
        after = {happened.event.step + 1 for happened in run.history.of(kind)}
        if sum(number in after for number in numbers) >= MOSTLY * len(numbers):
            return case, key
    waiting = sum(times.steps[place].parts.get("data", 0.0) for place in found)
    if waiting > MOSTLY * sum(found.values()):
        again = run.steps_per_epoch and every and abs(every - run.steps_per_epoch) <= 1
        return ("data_each_epoch" if again else "data"), ""
    if every and every == run.recipe.logging_steps:
        return "log", ""
    return ("others_regularly" if every else "others"), ""


@rule("formula: cost/memory.py", gives_way_to=("out_of_memory",))
def memory_over_prediction(run: RunRecord) -> Iterator[Finding]:
    """A step allocated more memory than the plan had predicted, or a full GPU reserved much more than it used."""
    event = run.history.last(Memory)
    if event is None:
        return
    allocated, predicted, reserved = event.allocated_bytes, sum(event.predicted.values()), event.reserved_bytes
    tight = 0 < TIGHT * run.free_bytes < max(allocated, reserved)
    if predicted and allocated > max(OVER * predicted, predicted + LEAST_BYTES):
        examples = run.techniques.get("micro_batch", {}).get("examples", run.recipe.train_batch_size)
        smaller = f"techniques.micro_batch.examples={examples // 2}" if examples > 1 else \
            "techniques.activation_checkpointing=on"
        yield told("memory_over_prediction.tight" if tight else "memory_over_prediction.loose", times=allocated / predicted,
                   smaller=smaller, step=event.step, allocated_bytes=allocated, predicted_bytes=predicted,
                   reserved_bytes=reserved)
    elif reserved > FRAGMENTED * allocated and tight:
        yield told("memory_over_prediction.fragmented", times=reserved / allocated, step=event.step,
                   allocated_bytes=allocated, predicted_bytes=predicted, reserved_bytes=reserved)


@rule("formula: cost/estimate.py", gives_way_to=("slow_down", "slow_steps", "out_of_memory"))
def unlike_prediction(run: RunRecord) -> Iterator[Finding]:
    """The time of a step against the plan's prediction."""
    estimate, step_s = run.estimate, run.step_s
    if not estimate or step_s is None or len(run.steady_steps) < LEAST_TIMED:
        return
    low, high = estimate["step_s"]
    case = "slower" if step_s > OUTSIDE * high else "as_predicted"
    if case == "slower" or step_s >= low / OUTSIDE:
        load = run.history.start.load
        yield told(f"unlike_prediction.{case}", *_peak(run), times=step_s / high, step_s=step_s, low_s=low, predicted_s=high,
                   loaded=f"the machine had a load of {load:.2g} when the run began; " if load and load > IDLE_LOAD else "",
                   most=step_s / low, estimate_basis=estimate["basis"])


def _peak(run: RunRecord) -> Iterator[str]:
    event = run.history.last(Memory)
    if event and (predicted := sum(event.predicted.values())):
        yield f"{event.allocated_bytes / MIB:,.0f} MiB allocated at the peak; the plan predicted {predicted / MIB:,.0f} MiB"
