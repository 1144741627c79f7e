"""Cures, tried: a few windows of steps with the change and without, in turns, each in a process of its own.

What arithmetic promises is what a cure could give at most; what it does give, two processes show in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from powertrain.diagnosis.observed import RECOMPILATION, Observed, Remedy
from powertrain.diagnosis.verdict import promise_of
from powertrain.evidence.clock import LEAST_PAIRS, LEAST_PARTS, Arena, CannotRun, Pace
from powertrain.records.evidence import INVALID, Arm

WORTH_TRYING = 1.03          # times as fast: what cannot give more is not tried
PACE = Pace(window_s=0.4, pairs=LEAST_PAIRS, most_pairs=LEAST_PAIRS + 2, enough=0.05, warm_up_s=2.0)
WINDOWS = 2 * (LEAST_PAIRS + LEAST_PARTS)    # that a trial takes at least, of both arms together
Say = Callable[[str], None]


def try_remedies(words: Sequence[str], observed: Observed, remedies: Sequence[Remedy], *, cache: Path, deadline: float,
                 start_s: float, say: Say, preload: Sequence[str] = ()) -> tuple[Remedy, ...]:
    """The remedies with the speed that was seen of them, those that promise most first, as far as there is time.

    `start_s`: what an arm's process takes until its first step. `deadline`: of time.monotonic().
    """
    order = sorted(range(len(remedies)), key=lambda place: -promise_of(remedies[place], observed))
    tried = list(remedies)
    with Arena(cache, preload=preload) as arena:
        for place in order:
            remedy = remedies[place]
            # what compiles now and then shows in whole runs only, not in a few windows
            if promise_of(remedy, observed) < WORTH_TRYING or remedy.against == RECOMPILATION:
                continue
            if time.monotonic() + expected_s(observed, start_s) > deadline:
                say(f"no time left to try {' '.join(remedy.cure.words)}; a larger --budget does")
                continue
            tried[place] = _tried(arena, words, remedy, deadline, say)
    return tuple(tried)


def expected_s(observed: Observed, start_s: float) -> float:
    """Of a trial: two processes start, and both take their windows."""
    step_s = max(observed.step_s)
    return 2 * start_s + WINDOWS * max(step_s, PACE.window_s)


def _tried(arena: Arena, words: Sequence[str], remedy: Remedy, deadline: float, say: Say) -> Remedy:
    changed = " ".join(remedy.cure.words)
    say(f"trying {changed}")
    try:
        found, _, _ = arena.compare(Arm("as it is", tuple(words)), Arm(changed, (*words, *remedy.cure.words)), PACE,
                                    deadline=deadline)
    except CannotRun as error:
        return replace(remedy, speed=1.0, basis=f"measured: it does not run ({error})")
    if found.speed is None or found.verdict == INVALID:
        return replace(remedy, speed=1.0, basis=f"measured: {found.because}")
    return replace(remedy, speed=found.speed.median, basis=f"measured: steps {found.speed.median:.2f} times as fast with it "
                   f"({found.speed.low:.2f} to {found.speed.high:.2f}, {found.pairs} pairs of windows)")
