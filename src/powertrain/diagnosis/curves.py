"""Robust statistics of loss curves and step times, and the stretches of slow steps in them.

Noise is computed from the differences of neighbours, which a slow trend hardly enters; its unit is the standard deviation of
normal noise of that size. Medians are used throughout, so that one wild value moves nothing. Where steps differ in their
number of slots, the time of a step is scaled to the mean number, because a step with more tokens rightly takes longer.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, median

from powertrain.diagnosis.run_record import RunRecord
from powertrain.records.events import Step
from powertrain.records.timeline import quantile

MAD_TO_SIGMA = 1.4826        # of normal noise: its standard deviation over the median of its sizes
MEDIAN_ERROR = 1.2533        # sqrt(pi / 2): a median's standard error over that of a mean, of normal noise
SLOWER = 1.2                 # times the usual time: such a stretch is slow
SINGLE = 2.0                 # times its neighbours: such a single step is slow
USUAL_QUANTILE = 0.25        # of the levels: the undisturbed time
WINDOW_STEPS = 8             # steps make a level
LEAST_WINDOWS = 3            # of them make a stretch ...
LEAST_STEPS = 40             # ... in a run of so many steps
EVEN = 1.05                  # most slots over fewest: below it, steps count as equal
SIGNIFICANT = 4.0            # standard errors of a level


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of the values without their trend; 0 below three values."""
    if len(values) < 3:
        return 0.0
    differences = [abs(later - earlier) for earlier, later in itertools.pairwise(values)]
    return MAD_TO_SIGMA * median(differences) / math.sqrt(2)


def median_error(values: Sequence[float]) -> float:
    """Return the standard error of the values' median."""
    return MEDIAN_ERROR * noise(values) / math.sqrt(len(values))


def level(values: Sequence[float], at: int, width: int) -> float:
    """Return the median of at most `width` values before `at`, or of the first values where none is before."""
    return median(values[max(0, at - width):at] or values[:width])


def window(count: int) -> int:
    """Return how many steps make one level: a twentieth of the run, 5 to 50."""
    return min(50, max(5, count // 20))


def windows(values: Sequence[float], width: int) -> list[float]:
    """Return the medians of neighbouring groups of `width` values; an incomplete last group is left out."""
    return [median(values[first:first + width]) for first in range(0, len(values) - width + 1, width)]


@dataclass(frozen=True)
class Timed:
    steps: tuple[Step, ...]                  # without the machine's warm-up, in order
    seconds: tuple[float, ...]               # of each, scaled to equal slots


@dataclass(frozen=True)
class Stretch:
    first: int                               # place of its first step among the timed ones
    until: int                               # of the first one behind it
    usual_s: float                           # of a step elsewhere
    slow_s: float                            # of a step within
    sudden: bool                             # it began with a jump, not by drifting

    @property
    def lost_s(self) -> float:
        return (self.slow_s - self.usual_s) * (self.until - self.first)


def timed(run: RunRecord) -> Timed:
    steps = tuple(run.steady_steps)
    slots = [step.real_tokens + (step.padding_tokens or 0) for step in steps]
    if not steps or min(slots) <= 0 or max(slots) <= EVEN * min(slots):
        return Timed(steps, tuple(float(step.seconds) for step in steps))
    usual = mean(slots)
    return Timed(steps, tuple(step.seconds * usual / found for step, found in zip(steps, slots, strict=True)))


@lru_cache(maxsize=4)        # several symptoms look at the same run
def slow_stretches(seconds: tuple[float, ...]) -> tuple[Stretch, ...]:
    """Return the slow stretches in order; none in a run that is too short."""
    if len(seconds) < LEAST_STEPS:
        return ()
    levels = windows(seconds, WINDOW_STEPS)
    usual = quantile(levels, USUAL_QUANTILE)
    # the noise of the groups nearest to the usual time is that of the steps themselves
    near = sorted(range(len(levels)), key=lambda at: abs(levels[at] - usual))[:3]
    error = max(median_error(seconds[at * WINDOW_STEPS:(at + 1) * WINDOW_STEPS]) for at in near)
    slow = [level > max(SLOWER * usual, usual + SIGNIFICANT * error) for level in levels]
    found, first = [], 0
    for at, is_slow in enumerate([*slow, False]):
        if not is_slow:
            if at - first >= LEAST_WINDOWS:
                found.append(_stretch(seconds, levels, first, at, usual))
            first = at + 1
    return tuple(found)


def _stretch(seconds: Sequence[float], levels: Sequence[float], first: int, until: int, usual: float) -> Stretch:
    last = len(seconds) if until == len(levels) else until * WINDOW_STEPS
    slow = median(seconds[first * WINDOW_STEPS:last])
    before = levels[first - 1] if first else usual
    sudden = levels[first] > usual + 0.6 * (slow - usual) and before < usual + 0.4 * (slow - usual)
    return Stretch(first * WINDOW_STEPS, last, usual, slow, sudden)


def single_slow(times: Timed) -> dict[int, float]:
    """Return place -> seconds lost, of steps that took far longer than those around them; of a short run none.

    Steps in slow stretches are left out.
    """
    if len(times.seconds) < LEAST_STEPS:
        return {}
    found, within = {}, {place for one in slow_stretches(times.seconds) for place in range(one.first, one.until)}
    for place, seconds in enumerate(times.seconds):
        near = times.seconds[max(0, place - WINDOW_STEPS):place] + times.seconds[place + 1:place + 1 + WINDOW_STEPS]
        if place not in within and near and seconds > SINGLE * median(near):
            found[place] = seconds - median(near)
    return found


def grown_parts(times: Timed, one: Stretch) -> dict[str, tuple[float, float]]:
    """Return part of a step -> its median seconds outside and inside of a stretch, the part that grew most first.

    Empty where no step lies outside.
    """
    inside, outside = times.steps[one.first:one.until], (*times.steps[:one.first], *times.steps[one.until:])
    names = [name for name in inside[0].parts if outside and all(name in step.parts for step in outside)]
    found = {name: (median(step.parts[name] for step in outside), median(step.parts[name] for step in inside))
             for name in names}
    return dict(sorted(found.items(), key=lambda one: one[1][0] - one[1][1]))
