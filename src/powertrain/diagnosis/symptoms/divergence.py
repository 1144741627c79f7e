"""A loss that climbed away from where it had been, and did not come back, or only after a large part of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from powertrain.diagnosis.instability import around
from powertrain.diagnosis.robust import median_error, noise, window, windows
from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import LEAST_STEPS, Symptom
from powertrain.records.findings import Finding, Risk

LOST_SHARE = 0.25            # of what had been learned: less may be an unlucky stretch of the data ...
RISEN_SHARE = 0.05           # ... and so may be less than this of the lowest loss
AWAY_SHARE, AWAY_WINDOWS = 0.1, 2            # above the lowest level by so much, for so many groups of steps: no spike
SIGNIFICANT = 6.0            # standard errors of the two medians: one chance in a billion, of normal noise


class Divergence(Symptom):
    """Compared are medians of groups of steps, so that neither a spike nor noise looks like one."""

    name = "divergence"
    rests_on = "documentation: document 004, monitor the loss history for divergence"
    gives_way_to = frozenset({"not_finite"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        losses = run.losses
        if (found := _diverged(losses)) is None:
            yield from cls._came_back(run)
            return
        lowest, now, onset = found
        seen, first = around(run, onset), median(losses[:window(len(losses))])
        number = run.steps[onset]["step"]
        gained = f"had fallen from {first:.4g} to {lowest:.4g}" if lowest < first else f"began at {first:.4g}"
        yield cls.found(
            "critical", f"the loss diverged: from {lowest:.4g} it rose to {now:.4g}",
            f"it {gained}, left that level about step {number:,}, and was not back {len(losses) - onset:,} steps later: those "
            f"steps made the model worse. Likely because {seen.because}", seen.evidence, seen.cure,
            expected=f"the loss stays below {lowest:.4g}", risk=Risk(accuracy="low"))


    @classmethod
    def _came_back(cls, run: RunRecord) -> Iterator[Finding]:
        if (found := _away(run.losses)) is None:
            return
        first, until, low, high = found
        seen, share = around(run, first), (until - first) / len(run.losses)
        yield cls.found(
            "critical" if share > LOST_SHARE else "moderate",
            f"the loss blew up: from {low:.4g} it rose to {high:.4g}, and {until - first:,} steps passed until it was back",
            f"it left its level about step {run.steps[first]['step']:,}: {share:.0%} of the run went into learning again what "
            f"had been lost. Likely because {seen.because}", seen.evidence, seen.cure,
            expected=f"{until - first:,} steps that learn something new", risk=Risk(accuracy="low"))


def _away(losses: Sequence[float]) -> tuple[int, int, float, float] | None:
    """The longest time away that ended: its first place and the one behind it, the level it left, the highest it reached."""
    if len(losses) < LEAST_STEPS:
        return None
    width = window(len(losses))
    error, lowest = SIGNIFICANT * median_error(losses[-width:]), min(losses[:3])
    found, first = [], -1
    for number, level in enumerate([*windows(losses, width), losses[-1]]):
        if level > lowest + max(error, AWAY_SHARE * abs(lowest)):
            first = number if first < 0 else first
            continue
        if first >= 0 and number - first >= AWAY_WINDOWS:
            found.append((first * width, number * width, lowest, max(losses[first * width:number * width])))
        lowest, first = min(lowest, level), -1
    return max(found, key=lambda one: one[1] - one[0], default=None)


def _diverged(losses: Sequence[float]) -> tuple[float, float, int] | None:
    """The lowest level, the last one, and the place where it was left; None where it was not."""
    if len(losses) < LEAST_STEPS:
        return None
    width = window(len(losses))
    levels = windows(losses, width)
    lowest, last = min(levels), losses[-width:]
    now = median(last)
    place = (levels.index(lowest) + 1) * width
    enough = max(SIGNIFICANT * 2**0.5 * median_error(last), LOST_SHARE * (levels[0] - lowest), RISEN_SHARE * abs(lowest))
    if now - lowest <= enough:
        return None
    limit = lowest + max(3 * noise(losses[:place]), 0.1 * (now - lowest))
    # the first of the steps from which on the level stays above what its noise explains
    onset = next((at for at in range(place, len(losses)) if median(losses[at:at + width]) > limit), len(losses) - 1)
    return lowest, now, onset
