"""Steps that took longer from somewhere on, or for a while: where it began, which part of a step grew, and what was there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.stretches import WINDOW_STEPS, Stretch, Timed, grown_parts, slow_stretches, timed
from powertrain.diagnosis.symptoms.base import IDLE_LOAD, OUT_OF_MEMORY, Symptom, seconds
from powertrain.records.findings import Cure, Finding

WORTH_SHARE = 0.02           # of the steps' time: less lost is not worth a word
SERIOUS_SHARE = 0.1
MOSTLY = 0.7                 # of what was lost, in one part of the step: then it is that part
FULL_SHARE = 0.9             # of the machine's memory: near that, a system begins to swap
COMPUTING = ("forward", "backward", "optimizer")


class SlowDown(Symptom):
    name = "slow_down"
    rests_on = "fact: the times of the run's steps"

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        times = timed(run)
        found = [one for one in slow_stretches(times.seconds) if not _is_explained(run, times, one)]
        total_s, lost_s = sum(times.seconds), sum(one.lost_s for one in found)
        if not found or lost_s < WORTH_SHARE * total_s:
            return
        worst = max(found, key=lambda one: one.lost_s)
        because, cure = _likely(run, times, worst)
        yield cls.found(
            "moderate" if lost_s > SERIOUS_SHARE * total_s else "low",
            f"steps took {worst.slow_s / worst.usual_s:.2g} times as long {_where(times, worst)}",
            f"{seconds(worst.slow_s)} instead of {seconds(worst.usual_s)}"
            + (f", and {len(found) - 1} more such stretches" if len(found) > 1 else "")
            + f": {seconds(lost_s)} of {seconds(total_s)} were lost. {because}",
            list(_evidence(run, times, worst)), cure, expected=f"at most {total_s / (total_s - lost_s):.3g} times as fast",
            basis="formula: the run's steps, all at their usual time")


def _where(times: Timed, one: Stretch) -> str:
    first, last = times.steps[one.first]["step"], times.steps[one.until - 1]["step"]
    if one.until == len(times.steps):
        return f"from step {first:,} on"
    return f"until step {last:,}" if one.first == 0 else f"between steps {first:,} and {last:,}"


def _is_explained(run: RunRecord, times: Timed, one: Stretch) -> bool:
    """Smaller passes after memory ran out are slower, and out_of_memory.py says so."""
    first, before = times.steps[one.first]["step"], times.steps[max(0, one.first - 2 * WINDOW_STEPS)]["step"]
    return any(OUT_OF_MEMORY in warning.event.get("message", "") and before <= warning.after_step + 1 <= first + WINDOW_STEPS
               for warning in run.history.of("warning"))


def _outside(times: Timed, one: Stretch) -> list[dict[str, object]]:
    return [dict(step) for step in (*times.steps[:one.first], *times.steps[one.until:])]


def _growth(times: Timed, one: Stretch) -> dict[str, tuple[float, float]]:
    outside = _outside(times, one)
    return grown_parts(times.steps[one.first:one.until], outside) if outside else {}


def _evidence(run: RunRecord, times: Timed, one: Stretch) -> Iterator[str]:
    first, before = times.steps[one.first]["step"], times.steps[one.first - 1]["step"] if one.first else 0
    yield f"it began {'at once' if one.sudden else 'slowly'}, about step {first:,}" if one.first else "it was so from the start"
    for part, (before, within) in _growth(times, one).items():
        if within > before * 1.05:
            yield f"{part}: {seconds(before)} elsewhere, {seconds(within)} there"
    yield from _sessions(run, before - WINDOW_STEPS, first + WINDOW_STEPS)


def _sessions(run: RunRecord, after: int, until: int) -> Iterator[str]:
    """The one that began between these steps, and the load of the machine then."""
    for happened in (*run.history.of("start"), *run.history.of("resume")):
        began, load = happened.event.get("step", 0), happened.event.get("load")
        if load is not None and after <= began <= until and (began or load > IDLE_LOAD):
            yield f"a session began after step {began:,}, with a load of {load:.2g} on the machine"


def _likely(run: RunRecord, times: Timed, one: Stretch) -> tuple[str, Cure]:
    growth, lost = _growth(times, one), one.slow_s - one.usual_s
    if growth:
        part, (before, within) = next(iter(growth.items()))
        if part in ("data", "copy") and within - before > MOSTLY * lost:
            return ("The waiting for data grew: its source became slower, or was no longer in the disk's cache",
                    Cure("let threads make batches ahead", words=("techniques.loader=on",)))
    machine_bytes = (run.facts.get("hardware") or {}).get("memory_bytes") or 0
    peak_bytes = (run.history.ends or {}).get("peak_memory_bytes") or 0
    if machine_bytes and peak_bytes > FULL_SHARE * machine_bytes:
        return (f"The process held {peak_bytes / machine_bytes:.0%} of the memory, so the system may have swapped",
                Cure("use less memory", words=("techniques.activation_checkpointing=on",)))
    if _evenly(growth):
        return ("Forward, backward and update grew alike, so the machine itself was slower: another process, or a clock "
                "lowered by heat or power", Cure("look at what else runs (`powertrain diagnose` watches the machine), and at "
                                                 "its temperature"))
    grew = next(iter(growth), None)
    return (f"It was mostly {grew}" if grew else "Its parts were not recorded",
            Cure("look at what else ran then; `powertrain diagnose` watches the machine"))


def _evenly(growth: dict[str, tuple[float, float]]) -> bool:
    ratios: Sequence[float] = [growth[part][1] / growth[part][0] for part in COMPUTING if growth.get(part, (0.0,))[0] > 0]
    return len(ratios) > 1 and min(ratios) > 1.1 and max(ratios) < 1.5 * min(ratios)
