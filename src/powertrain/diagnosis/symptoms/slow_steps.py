"""Single steps that took far longer than those around them: whether they come at an interval, and what comes at the same."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.stretches import LEAST_STEPS, Timed, single_slow, slow_stretches, timed
from powertrain.diagnosis.symptoms.base import Symptom, seconds
from powertrain.records.findings import Cure, Finding

WORTH_SHARE = 0.02           # of the steps' time
SERIOUS_SHARE = 0.1
LEAST = 4                    # slow steps: fewer show no interval
REGULAR_SHARE = 0.7          # of the gaps between them, that are the same
MOSTLY = 0.7                 # of what is lost, in one part


class SlowSteps(Symptom):
    """Where blocks are compiled, steps that compile again are slow too: those are the verdict's (recompilation)."""

    name = "slow_steps"
    rests_on = "fact: the times of the run's steps"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        times = timed(run)
        found = {} if compiles(run) else _single(times)
        total_s, lost_s = sum(times.seconds), sum(found.values())
        if len(found) < LEAST or lost_s < WORTH_SHARE * total_s:
            return
        numbers = [times.steps[place]["step"] for place in found]
        every = _interval(numbers)
        because, cure = _likely(run, times, found, numbers, every)
        named = ", ".join(f"{number:,}" for number in numbers[:6]) + (", ..." if len(numbers) > 6 else "")
        yield cls.found(
            "moderate" if lost_s > SERIOUS_SHARE * total_s else "low",
            f"every {every:,} steps one is slow" if every else f"{len(found):,} single steps were slow",
            f"together they took {seconds(lost_s)} more than those around them, {lost_s / total_s:.0%} of all steps. {because}",
            [f"slow steps: {named}"], cure, expected=f"at most {total_s / (total_s - lost_s):.3g} times as fast",
            basis="formula: the run's steps, all at their usual time")


def _single(times: Timed) -> dict[int, float]:
    """Place -> seconds lost; those in slow stretches are slow_down.py's."""
    if len(times.steps) < LEAST_STEPS:
        return {}
    within = {place for one in slow_stretches(times.seconds) for place in range(one.first, one.until)}
    return {place: lost_s for place, lost_s in single_slow(times).items() if place not in within}


def compiles(run: RunRecord) -> bool:
    return "torch_compile" in run.techniques


def _interval(numbers: Sequence[int]) -> int:
    """The steps between one and the next, where most gaps are the same; else 0."""
    gaps = Counter(later - earlier for earlier, later in itertools.pairwise(numbers))
    (gap, times), = gaps.most_common(1)
    return gap if gap > 1 and times >= REGULAR_SHARE * gaps.total() else 0


def _likely(run: RunRecord, times: Timed, found: dict[int, float], numbers: Sequence[int], every: int) -> tuple[str, Cure]:
    for kind, key in (("evaluation", "eval_steps"), ("checkpoint", "save_steps")):
        after = {happened.after_step + 1 for happened in run.history.of(kind)}
        if sum(number in after for number in numbers) >= MOSTLY * len(numbers):
            interval = max(1, every or round(run.last_step / len(numbers)))
            return (f"Each comes after {'an' if kind == 'evaluation' else 'a'} {kind}, which leaves caches and disk busy",
                    Cure(f"do it less often ({key})", words=(f"{key}={2 * interval}",)))
    waiting = sum(times.steps[place].get("parts", {}).get("data", 0.0) for place in found)
    if waiting > MOSTLY * sum(found.values()):
        again = run.steps_per_epoch and every and abs(every - run.steps_per_epoch) <= 1
        return ("They wait for data" + (", once an epoch" if again else ""),
                Cure("let threads make batches ahead", words=("techniques.loader=on",)))
    if every and every == run.recipe.logging_steps:
        return ("That is the interval of logging_steps, at which the events are read and written",
                Cure("log less often", words=(f"logging_steps={10 * every}",)))
    return ("Nothing that the run does comes at that interval: another process on the machine does, perhaps" if every else
            "They come at no interval: another process on the machine, perhaps",
            Cure("look at what else runs; `powertrain diagnose` watches the machine"))
