"""A run's events on one clock: when each step ended, and where every second of the wall time went.

The clock shows seconds since the training began. It stands still between a stop and its continuation. An event carries
the time of day at which it was written, and steps are written several at a time; a step therefore ends when its own
seconds have passed, and the clock is set by the other events. What lies between is nobody's: it is `other`.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeGuard, TypeVar

from powertrain.records.events import End, Evaluated, Event, ModelSaved, Sample, Saved, Start, Step

AnEvent = TypeVar("AnEvent", bound=Event, covariant=True)

OTHER = "other"
NOT_SPLIT = "step, not split"                # of runs that were written before steps had parts
PARTS = ("data wait", "copy", "forward", "backward", "communication", "optimizer", NOT_SPLIT, "evaluation", "samples",
         "checkpoint", OTHER)
_STEP_PARTS = {"data": "data wait"}          # a step's event has other names for them
_EVENT_PARTS: Mapping[type[Event], str] = {Evaluated: "evaluation", Sample: "samples", Saved: "checkpoint",
                                           ModelSaved: "checkpoint"}
WARM_SHARE = 0.8             # of the median speed: warm-up lasts until the speed first reaches this ...
MOST_WARM_UP = 0.25          # ... and for a quarter of a session's steps at most
RISEN_SHARE = 0.005          # of the lowest held-out loss: so far above it the last one has risen
BITS = 1074                  # behind the point, in the smallest float
FALLING_SHARE = 0.02         # of the last held-out loss: by so much the last two differ where it was still falling


@dataclass(frozen=True)
class Happened(Generic[AnEvent]):
    """An event that is no step, and the clock when it was over."""

    at_s: float
    after_step: int
    event: AnEvent


@dataclass(frozen=True)
class HeldOut:
    """The held-out losses of a run that compare with each other, as (step, loss)."""

    all: tuple[tuple[int, float], ...]
    best: tuple[int, float]
    trend: Literal["risen", "falling", "level"]              # at the end


@dataclass(frozen=True)
class Sharing:
    """How the processes of a run share its steps."""

    communication_share: float               # of the steps' time, that the exchange takes
    waiting_share: float                     # of the steps' time, that a process waits for the slowest one, on average
    token_imbalance: float                   # tokens of the process with the most, over the mean of all: 1 is even


@dataclass(frozen=True)
class History:
    start: Start                             # of the last session: a Start or a Resume
    steps: tuple[Step, ...]
    ends_s: tuple[float, ...]                # the clock at the end of each step
    happened: tuple[Happened[Event], ...]
    spent: tuple[Mapping[str, float], ...]   # for each step: seconds by part, of it and of what came until the next one
    wall_s: float
    sessions: tuple[int, ...]                # the steps that each one began after: (0,), or (0, 60) once continued
    ends: End | None                         # of the last session
    first_time: float | None                 # when the run began, as the time of day
    repeated_steps: int = 0                  # done, lost with a killed session, and done again
    repeated_s: float = 0.0
    overrun_s: float = 0.0                   # by which the parts exceed the wall time that the run measured of itself

    @property
    def state(self) -> str:
        """Return "finished", "failed" or "stopped (SIGINT)", or "" where no end was written."""
        return self.ends.state if self.ends else ""

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part; they sum to `wall_s`."""
        return {part: sum(spent.get(part, 0.0) for spent in self.spent) for part in PARTS
                if any(spent.get(part) for spent in self.spent)}

    @cached_property
    def speeds(self) -> tuple[float | None, ...]:
        """Return the real tokens per second of each step."""
        return tuple(step.real_tokens / step.seconds if step.seconds > 0 else None for step in self.steps)

    def of(self, kind: type[AnEvent]) -> tuple[Happened[AnEvent], ...]:
        """Return what happened of one kind, its subclasses included."""
        return tuple(Happened(one.at_s, one.after_step, one.event) for one in self.happened if isinstance(one.event, kind))

    def last(self, kind: type[AnEvent]) -> AnEvent | None:
        """Return the last event of one kind, its subclasses included."""
        return last_of(kind, [one.event for one in self.happened])


@dataclass
class _Clock:
    now_s: float = 0.0
    began_s: float = 0.0                     # where on this clock the session began
    began_time: float = 0.0
    spent: list[dict[str, float]] = field(default_factory=list)
    waiting: dict[str, float] = field(default_factory=dict)      # spent before the first step

    def spend(self, part: str, seconds: float) -> None:
        where = self.spent[-1] if self.spent else self.waiting
        where[part] = where.get(part, 0.0) + seconds
        self.now_s += seconds

    def spend_step(self, step: Step) -> None:
        self.spent.append({} if self.spent else self.waiting)
        known = {part: seconds for name, seconds in step.parts.items() if (part := _STEP_PARTS.get(name, name)) in PARTS}
        for part, seconds in known.items():
            self.spend(part, seconds)
        rest = step.seconds - sum(known.values())
        if rest > 0 or not known:            # parts are written with six digits behind the point
            self.spend(OTHER if known else NOT_SPLIT, rest)

    def set_to(self, at_s: float) -> None:
        """Spend the time until then as `other`. A clock of the day that was set back moves nothing."""
        if at_s > self.now_s:
            self.spend(OTHER, at_s - self.now_s)


def read(events: Sequence[Event], all_events: Sequence[Event] = ()) -> History:
    """Return the history of `events`. `all_events` are all that were written: with them, steps done twice are counted."""
    clock, steps, ends, sessions = _Clock(), list[Step](), list[float](), list[int]()
    happened, start, last_end, overrun_s = list[Happened[Event]](), Start(), None, 0.0
    for event in events:
        if isinstance(event, Step):
            clock.spend_step(event)
            steps.append(event)
            ends.append(clock.now_s)
            continue
        if isinstance(event, Start):
            clock.began_s, clock.began_time, start, last_end = clock.now_s, event.time, event, None
            sessions.append(event.step)
        elif isinstance(event, End):
            last_end, wall_s = event, clock.began_s + event.seconds
            overrun_s += max(0.0, clock.now_s - wall_s)
            clock.set_to(wall_s)
        else:
            part = _EVENT_PARTS.get(type(event))
            clock.spend(part or OTHER, float(getattr(event, "seconds", 0.0)) if part else 0.0)
            clock.set_to(clock.began_s + event.time - clock.began_time)
        happened.append(Happened(clock.now_s, steps[-1].step if steps else 0, event))
    if steps and isinstance(events[-1], Step):           # killed: the last steps were written when they had ended
        clock.set_to(clock.began_s + events[-1].time - clock.began_time)
    counting = {(step.step, step.time) for step in steps}        # the others were written, and a continuation went back
    again = [event for event in all_events if isinstance(event, Step) and (event.step, event.time) not in counting]
    return History(start, tuple(steps), tuple(ends), tuple(happened), tuple(clock.spent) or (clock.waiting,), clock.now_s,
                   tuple(sessions), last_end, events[0].time if events else None, len(again),
                   sum(event.seconds for event in again), overrun_s)


def warm_ups(history: History) -> list[range]:
    """Return the steps, by place, at each session's beginning before the speed first reaches most of its median."""
    speeds = history.speeds
    known = sorted(speed for speed in speeds if speed is not None)
    if len(known) < 4:
        return []
    enough = WARM_SHARE * known[len(known) // 2]
    numbers = [step.step for step in history.steps]
    firsts = sorted({sum(number <= began for number in numbers) for began in history.sessions} - {len(numbers)})
    found = []
    for first, until in zip(firsts, [*firsts[1:], len(numbers)], strict=True):
        warm = next((place for place in range(first, until) if (speeds[place] or 0.0) >= enough), until)
        found.append(range(first, min(warm, first + int((until - first) * MOST_WARM_UP))))
    return [places for places in found if places]


def steady(history: History) -> list[int]:
    """Return the places of the steps with a speed that are no warm-up; if there are none, of all steps with a speed."""
    warm = {place for places in warm_ups(history) for place in places}
    have = [place for place, speed in enumerate(history.speeds) if speed is not None]
    return [place for place in have if place not in warm] or have


def steady_speeds(history: History) -> list[float]:
    """Return the real tokens per second of the steady steps."""
    return [speed for place in steady(history) if (speed := history.speeds[place]) is not None]


def spread(found: Sequence[float]) -> tuple[float, float, float]:
    """Return where eight values in ten lie, with the median: the 10%, 50% and 90% quantiles."""
    return quantile(found, 0.1), quantile(found, 0.5), quantile(found, 0.9)


def estimate_of(history: History, plan: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the estimate of the run's last session, made when that session began; the plan may have changed since."""
    found: Mapping[str, Any] | None = history.start.estimate or plan.get("estimate")
    return found


def sharing(steps: Sequence[Step]) -> Sharing | None:
    """Return how several processes shared these steps, on average over their time; None where one process took them."""
    shared = [step for step in steps if step.communication_share is not None]
    seconds = sum(step.seconds for step in shared)
    if not seconds:
        return None

    def mean(figure: Callable[[Step], float | None]) -> float:
        return sum((figure(step) or 0.0) * step.seconds for step in shared) / seconds

    return Sharing(mean(lambda step: step.communication_share), mean(lambda step: step.waiting_share),
                   mean(lambda step: step.token_imbalance))


def held_out_trend(history: History) -> HeldOut | None:
    """Return the trend of the held-out loss over the most frequent text; None for fewer than three evaluations of this text."""
    events = [(one.after_step, one.event) for one in history.of(Evaluated)]
    tokens = Counter(event.tokens for _, event in events)
    losses = tuple((step, event.loss) for step, event in events if event.tokens == tokens.most_common(1)[0][0]
                   and math.isfinite(event.loss))
    if len(losses) < 3:
        return None
    best, (_, before), (_, last) = min(losses, key=lambda found: found[1]), losses[-2], losses[-1]
    if last > best[1] * (1 + RISEN_SHARE):
        return HeldOut(losses, best, "risen")
    return HeldOut(losses, best, "falling" if before - last > FALLING_SHARE * last else "level")


def last_of(kind: type[AnEvent], events: Sequence[Event]) -> AnEvent | None:
    """Return the last event of a kind, its subclasses included."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value is known, and neither NaN nor infinite."""
    return value is not None and math.isfinite(value)


def quantile(found: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, by linear interpolation between the two nearest."""
    ordered = sorted(found)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rolling_mean(found: Sequence[float | None], steps: int) -> list[float | None]:
    """Return the mean of the finite values around each, so many together, fewer at the ends; a gap stays a gap."""
    total, known, means = 0, 0, list[float | None]()
    for place, comes, goes in _moving(found, steps):
        if is_finite(comes):
            total, known = total + _exact(comes), known + 1
        if is_finite(goes):
            total, known = total - _exact(goes), known - 1
        if place >= 0:
            means.append(total / (known << BITS) if is_finite(found[place]) else None)
    return means


def rolling_median(found: Sequence[float | None], steps: int) -> list[float | None]:
    """Return the median of the same values."""
    near, medians = list[float](), list[float | None]()
    for place, comes, goes in _moving(found, steps):
        if is_finite(comes):
            bisect.insort(near, comes)
        if is_finite(goes):
            del near[bisect.bisect_left(near, goes)]
        if place >= 0:
            medians.append((near[(len(near) - 1) // 2] + near[len(near) // 2]) / 2 if is_finite(found[place]) else None)
    return medians


def _moving(found: Sequence[float | None], steps: int) -> Iterator[tuple[int, float | None, float | None]]:
    """Yield the places of a moving window's middle, the first ones below 0, with the value that comes in and that goes out."""
    for place in range(-(steps // 2), len(found)):
        comes, goes = place + steps // 2, place - steps // 2 - 1
        yield place, found[comes] if comes < len(found) else None, found[goes] if goes >= 0 else None


def _exact(value: float) -> int:
    """Return a number times 2**BITS, of which no bit is lost: a spike that has left a sum leaves no trace in it."""
    over, under = value.as_integer_ratio()
    return (over << BITS) // under


def bins(count: int, most: int) -> list[tuple[int, int]]:
    """Return ranges that divide `count` things into at most `most` groups of nearly equal size."""
    groups = min(count, most)
    return [(round(i * count / groups), round((i + 1) * count / groups)) for i in range(groups)]
