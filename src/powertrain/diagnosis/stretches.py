"""Where the steps of a run were slower than elsewhere: stretches of many steps, and single ones between ordinary ones.

The time of a step is scaled to the run's mean number of slots where steps differ in them: one with more tokens takes longer,
and that is no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, median

from powertrain.diagnosis.robust import median_error, windows
from powertrain.diagnosis.run_record import RunRecord
from powertrain.records.events import Step
from powertrain.records.timeline import quantile

SLOWER = 1.2                 # times the usual time: a stretch of that is slow
SINGLE = 2.0                 # times: so long a step stands out alone, whatever the noise
USUAL_QUANTILE = 0.25        # of the levels: what the machine does when nothing is in its way
WINDOW_STEPS = 8             # steps make a level
LEAST_WINDOWS = 3            # of them make a stretch ...
LEAST_STEPS = 40             # ... in a run of so many steps
EVEN = 1.05                  # most slots over fewest: below it, steps count as equally large
SIGNIFICANT = 4.0            # standard errors of a level


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
    """In order; none in a run too short to tell."""
    if len(seconds) < LEAST_STEPS:
        return ()
    levels = windows(seconds, WINDOW_STEPS)
    usual = quantile(levels, USUAL_QUANTILE)
    error = max(median_error(seconds[at * WINDOW_STEPS:(at + 1) * WINDOW_STEPS]) for at in _near(levels, usual))
    slow = [level > max(SLOWER * usual, usual + SIGNIFICANT * error) for level in levels]
    found, first = [], 0
    for at, is_slow in enumerate([*slow, False]):
        if not is_slow:
            if at - first >= LEAST_WINDOWS:
                found.append(_stretch(seconds, levels, first, at, usual))
            first = at + 1
    return tuple(found)


def _near(levels: Sequence[float], usual: float) -> list[int]:
    """The quietest groups: their noise is that of the steps themselves."""
    return sorted(range(len(levels)), key=lambda at: abs(levels[at] - usual))[:3]


def _stretch(seconds: Sequence[float], levels: Sequence[float], first: int, until: int, usual: float) -> Stretch:
    last = len(seconds) if until == len(levels) else until * WINDOW_STEPS
    slow = median(seconds[first * WINDOW_STEPS:last])
    before = levels[first - 1] if first else usual
    sudden = levels[first] > usual + 0.6 * (slow - usual) and before < usual + 0.4 * (slow - usual)
    return Stretch(first * WINDOW_STEPS, last, usual, slow, sudden)


def single_slow(times: Timed) -> dict[int, float]:
    """Place -> seconds lost, of steps that took far longer than those around them."""
    found = {}
    for place, seconds in enumerate(times.seconds):
        near = times.seconds[max(0, place - WINDOW_STEPS):place] + times.seconds[place + 1:place + 1 + WINDOW_STEPS]
        if near and seconds > SINGLE * median(near):
            found[place] = seconds - median(near)
    return found


def grown_parts(inside: Sequence[Step], outside: Sequence[Step]) -> dict[str, tuple[float, float]]:
    """Part of a step -> its median seconds outside and inside, the one that grew most first."""
    names = [name for name in inside[0].parts if all(name in step.parts for step in outside)]
    found = {name: (median(step.parts[name] for step in outside), median(step.parts[name] for step in inside))
             for name in names}
    return dict(sorted(found.items(), key=lambda one: one[1][0] - one[1][1]))
