"""Two arms against each other: each in a process of its own, in turns A B B A, over the same optimizer steps.

Both arms warm up until their speed is steady, and by the same number of steps. Then they take windows of equally many
steps, one after the other; the two windows of a pair lie side by side in time, so what slows the machine for longer than
that slows both. Each pair gives one ratio of speeds; their median with its bootstrap interval is the result.
An arm that was measured keeps its process, and is wound back to its first step for the next comparison.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from powertrain.evidence.profile import Profile
from powertrain.evidence.stats import MARGIN, interval, noise_floor, speed_verdict
from powertrain.evidence.worker import ArmProcess, CannotRun, Order, Probe, Ready, Taken
from powertrain.records import Facts
from powertrain.records.evidence import FASTER, INCONCLUSIVE, INVALID, Arm, ArmRun, Comparison, Interval, Window

__all__ = ["Arena", "CannotRun", "Pace", "Probe"]

LEAST_PAIRS = 5
STEADY = 0.10                                # two parts of a warm-up whose speeds differ by less
LEAST_PARTS, MOST_PARTS = 3, 13              # of a warm-up: the first step and two more; data of changing lengths stay unsteady
PART = 0.1                                   # of a window: what one part of a warm-up takes

Compared = tuple[Comparison, ArmRun, ArmRun]     # of B against A, the run of A, the run of B


@dataclass(frozen=True)
class Pace:
    """The length of a measurement, and the certainty at which it ends."""

    window_s: float = 1.0                    # of the two arms on average
    pairs: int = 6                           # of windows, at least; never fewer than 5
    most_pairs: int = 24
    enough: float = 0.02                     # half-width of the interval at which a verdict is believed
    warm_up_s: float = 20.0
    lead_in_s: float = 0.2                   # of untimed steps before each window, in whole steps
    least_lead_in: int = 0                   # of untimed steps, however long they take


USUAL = Pace()


@dataclass
class Track:
    """The steps of one arm in one comparison."""

    process: ArmProcess
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    warm_up: list[Window] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)

    def first_step(self) -> None:
        self.warm_up.append(self.take(1))
        self.process.first_step_s = self.process.first_step_s or self.step_s      # a process has one first step

    def take(self, steps: int, untimed: int = 0) -> Window:
        """Take some timed steps; untimed steps before them let loader, caches, pages and clock rate recover from the pause."""
        taken: Taken = self.process.ask("window", untimed, steps)
        self.losses += taken.losses
        self.grad_norms += taken.grad_norms
        return taken.window

    @property
    def step_s(self) -> float:
        last = (self.windows or self.warm_up)[-1]
        return last.seconds / last.steps

    @property
    def warm_up_steps(self) -> int:
        return sum(window.steps for window in self.warm_up)

    @property
    def why_invalid(self) -> str | None:
        """Return why this run has no speed; None where it has one."""
        name = self.process.arm.name
        if not all(math.isfinite(loss) for loss in self.losses):
            return f"{name}: the loss is not finite"
        if not any(self.grad_norms):
            return f"{name}: all gradients are zero, so nothing is trained"
        if not all(math.isfinite(norm) for norm in self.grad_norms) and not self.process.ready.loss_scaling:
            return f"{name}: the gradients are not finite"
        return None

    def run(self) -> ArmRun:
        process = self.process
        return ArmRun(process.arm.name, process.ready_s, process.first_step_s, self.warm_up_steps, tuple(self.windows),
                      tuple(self.losses), tuple(self.grad_norms), process.ask("peak"), process.ready.techniques)


class Arena:
    """Keeps the processes of the arms, at most two at a time. Use it as a context manager.

    `preload`: modules that an arm's process imports first, which may add techniques. Of two arms that do not fit the memory
    together, whole runs are taken one after the other. `plans` (arm's name -> plan.json) and `facts` come from the processes.
    """

    def __init__(self, cache: Path, *, preload: Sequence[str] = ()):
        self.plans: dict[str, Mapping[str, Any]] = {}
        self.facts: Facts | None = None
        self._cache, self._preload = cache, tuple(preload)
        self._processes: list[ArmProcess] = []

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="powertrain-")
        return self

    def __exit__(self, *_: object) -> None:
        self._close_all()
        self._scratch.cleanup()

    def compare(self, a: Arm, b: Arm, pace: Pace = USUAL, *, margin: float = MARGIN, deadline: float | None = None) -> Compared:
        """Compare B with A. After `deadline` (of time.monotonic()) it stops as soon as there are 5 pairs.

        Raises CannotRun where an arm's process fails.
        """
        if a.name == b.name:
            raise ValueError(f"both arms are called {a.name!r}")
        try:
            tracks = (Track(self._at_first_step(a, beside=b)), Track(self._at_first_step(b, beside=a)))
            check_room([track.process.ready for track in tracks])
            return interleave(*tracks, pace, margin=margin, deadline=deadline)
        except CannotRun as error:
            self._close_all()
            if not error.out_of_memory:
                raise
        return self._one_after_the_other(a, b, pace, margin)

    def control(self, arm: Arm, pace: Pace = USUAL, deadline: float | None = None) -> Compared:
        """Compare the arm with itself: the difference is the noise of this machine."""
        found, first, second = self.compare(arm, replace(arm, name=f"{arm.name} again"), pace, deadline=deadline)
        if found.speed is not None and found.verdict == INCONCLUSIVE:
            verdict, because = speed_verdict(found.speed, max(MARGIN, noise_floor(found)))
            found = replace(found, verdict=verdict, because=because)
        return found, first, second

    def probe(self, arm: Arm, *, steps: int = 4, precision: str | None = None, seed: int | None = None) -> Probe:
        """Return the first steps of a fresh process, untimed, and the allocated peak of one more; or why it cannot run."""
        try:
            with self._start(arm, precision, seed) as process:
                found: Probe = process.ask("probe", steps)
                return found
        except CannotRun as error:
            return Probe((), (), None, str(error), error.technique)

    def profile(self, arm: Arm, *, steps: int = 3) -> Profile:
        """Return the seconds of a step by class of work, in a fresh process. Raises CannotRun if the process fails."""
        with self._start(arm) as process:
            found: Profile = process.ask("profile", steps)
            return found

    def _start(self, arm: Arm, precision: str | None = None, seed: int | None = None) -> ArmProcess:
        """Start a fresh process; the older of two kept processes is ended first."""
        while len(self._processes) > 1:
            self._processes.pop(0).close()
        scratch = tempfile.mkdtemp(dir=self._scratch.name)
        process = ArmProcess(Order(arm, str(self._cache), str(Path.cwd()), scratch, self._preload, precision, seed))
        if precision is None and seed is None:
            self.plans[arm.name] = process.ready.plan
            self.facts = self.facts or process.ready.facts
        return process

    def _at_first_step(self, arm: Arm, beside: Arm) -> ArmProcess:
        """Return the arm's process at its first step, rewound or fresh, without ending the process of `beside`."""
        for kept in self._processes:
            if kept.arm == arm:
                kept.ask("rewind")
                return kept
        for process in [process for process in self._processes if process.arm != beside]:
            self._processes.remove(process)
            process.close()
        process = self._start(arm)
        self._processes.append(process)
        process.ask("remember")
        return process

    def _close_all(self) -> None:
        while self._processes:
            self._processes.pop().close()

    def _one_after_the_other(self, a: Arm, b: Arm, pace: Pace, margin: float) -> Compared:
        """Compare whole runs A B B A, each in a fresh process, with enough windows for two runs of an arm."""
        each = math.ceil(max(LEAST_PAIRS, pace.pairs) / 2)
        tracks: dict[str, Track] = {}
        runs: dict[str, ArmRun] = {}
        warm, steps, untimed = 0, 0, 0
        for arm in (a, b, b, a):
            self._close_all()
            with self._start(arm) as process:
                track = Track(process)
                warm_up(track, pace, known_steps=warm)
                if not warm:
                    warm = track.warm_up_steps
                    steps, untimed = steps_per_window(pace, [track.step_s]), lead_in(pace, [track.step_s])
                if track.why_invalid is None:
                    track.windows += [track.take(steps, untimed) for _ in range(each)]
                run = track.run()
            earlier = runs.get(arm.name)
            tracks.setdefault(arm.name, track)
            runs[arm.name] = run if earlier is None else replace(earlier, windows=earlier.windows + run.windows)
        return judge(tracks[a.name], tracks[b.name], runs[a.name], runs[b.name], margin)


def interleave(a: Track, b: Track, pace: Pace, *, margin: float = MARGIN, deadline: float | None = None) -> Compared:
    """Compare B with A, two processes that are ready for their first step."""
    for track in (a, b):
        warm_up(track, pace)
    longest = max(a.warm_up_steps, b.warm_up_steps)
    for track in (a, b):
        if track.warm_up_steps < longest:
            track.warm_up.append(track.take(longest - track.warm_up_steps))
    if not (a.why_invalid or b.why_invalid):
        step_s = [a.step_s, b.step_s]
        steps, untimed = steps_per_window(pace, step_s), lead_in(pace, step_s)
        while not enough_pairs(a.windows, b.windows, pace, margin, deadline):
            for track in (a, b) if len(a.windows) % 2 == 0 else (b, a):      # A B B A
                track.windows.append(track.take(steps, untimed))
    return judge(a, b, a.run(), b.run(), margin)


def check_room(arms: Sequence[Ready]) -> None:
    """Raise CannotRun where both arms together do not fit the memory, before Linux kills a process."""
    needed_bytes, free_bytes = sum(arm.needed_bytes for arm in arms), arms[0].facts.hardware.free_memory_bytes
    if needed_bytes > free_bytes:
        raise CannotRun(f"the arms need {needed_bytes / 2**30:.1f} GiB together, and {free_bytes / 2**30:.1f} were free",
                        out_of_memory=True)


def warm_up(track: Track, pace: Pace, now: Callable[[], float] = time.monotonic, known_steps: int = 0) -> None:
    """Take `known_steps`; without them steps until two parts in a row differ by at most 10 % in speed, and at least 3 parts."""
    track.first_step()
    if known_steps:
        track.warm_up.append(track.take(known_steps - 1))
        return
    began, steps = now(), 1                  # compiling is no warming up
    while not is_steady(track.warm_up) and (len(track.warm_up) < LEAST_PARTS or now() - began < pace.warm_up_s):
        track.warm_up.append(track.take(steps))
        steps = max(1, math.ceil(PART * pace.window_s / track.step_s))


def is_steady(parts: Sequence[Window]) -> bool:
    """Return whether a warm-up may end. The first part, which is the first step, is ignored."""
    if len(parts) < LEAST_PARTS:
        return False
    before, last = parts[-2].tokens_per_s, parts[-1].tokens_per_s
    return abs(last - before) <= STEADY * max(before, last) or len(parts) >= MOST_PARTS


def steps_per_window(pace: Pace, step_s: Sequence[float]) -> int:
    """Return the steps with which the arms' windows take `window_s` on average."""
    return max(1, math.ceil(pace.window_s / statistics.mean(step_s)))


def lead_in(pace: Pace, step_s: Sequence[float]) -> int:
    """Return the untimed steps before each window: as many as fit `lead_in_s` on average."""
    return max(pace.least_lead_in, math.floor(pace.lead_in_s / statistics.mean(step_s)))


def ratios(a: Sequence[Window], b: Sequence[Window]) -> list[float]:
    """Return the speed of B over A for each pair of windows."""
    return [second.tokens_per_s / first.tokens_per_s for first, second in zip(a, b, strict=True)]


def enough_pairs(a: Sequence[Window], b: Sequence[Window], pace: Pace, margin: float, deadline: float | None) -> bool:
    """Return whether the pairs are enough for a verdict, or the time is up."""
    pairs = len(a)
    if pairs < LEAST_PAIRS:
        return False
    if pairs >= pace.most_pairs or (deadline is not None and time.monotonic() >= deadline):
        return True
    return pairs >= pace.pairs and is_clear(interval(ratios(a, b)), pace, margin)


def is_clear(speed: Interval, pace: Pace, margin: float) -> bool:
    """Return whether the interval is narrow, and wholly within the margin or wholly beyond it.

    To stop as soon as an interval happens to exclude 1 would call an effect in a twentieth of equal arms, which are looked
    at many times.
    """
    within = 1 - margin <= speed.low and speed.high <= 1 + margin
    return (speed.high - speed.low) / 2 <= pace.enough and (within or speed.low > 1 + margin or speed.high < 1 - margin)


def judge(first: Track, second: Track, a: ArmRun, b: ArmRun, margin: float) -> Compared:
    """Return the comparison of the arms with its verdict, and their runs."""
    why_invalid = first.why_invalid or second.why_invalid
    speed = None if why_invalid else interval(ratios(a.windows, b.windows))
    verdict, because = (INVALID, why_invalid or "") if speed is None else speed_verdict(speed, margin)
    step_s = (_median_step_s(a), _median_step_s(b))
    starts_s = [track.process.ready.apply_s + track.process.first_step_s - steady_s
                for track, steady_s in zip((first, second), step_s, strict=True)]
    compile_s = max(0.0, starts_s[1] - starts_s[0])
    gained_s = step_s[0] - step_s[1]         # not above 0 where pairs say otherwise than the arms' medians
    even = math.ceil(compile_s / gained_s) if verdict == FASTER and compile_s > 0 and gained_s > 0 else None
    return Comparison(a.arm, b.arm, speed, min(len(a.windows), len(b.windows)), verdict, because,
                      (_median_speed(a), _median_speed(b)), (a.peak_memory_bytes, b.peak_memory_bytes), compile_s, even), a, b


def _median_step_s(run: ArmRun) -> float:
    return statistics.median(window.seconds / window.steps for window in run.windows) if run.windows else run.first_step_s


def _median_speed(run: ArmRun) -> float:
    return statistics.median(window.tokens_per_s for window in run.windows) if run.windows else 0.0
