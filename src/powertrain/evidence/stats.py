"""Repeated measurements: taken by turns; median with interval, noise floor, and the verdict on a ratio of speeds."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from powertrain.records import RunFailed
from powertrain.records.evidence import FASTER, HARMFUL, INCONCLUSIVE, NO_EFFECT, Comparison, Interval

REPEATS = 6                                  # A B, B A, A B, B A, A B, B A
FEWEST = 5                                   # repeats that a median with an interval is made of
DRAWS = 4000                                 # of the bootstrap; its error is then well below the intervals' width
MARGIN = 0.02                                # a smaller effect is nobody's reason for anything
TOO_NOISY = 0.05                             # with a margin above this, "no effect" would be a claim that nobody checked

T = TypeVar("T")


class OutOfTime(RunFailed):
    """The deadline came before there were enough repeats for a result."""


def by_turns(arms: Mapping[str, Callable[[], T]], deadline: float, repeats: int = REPEATS) -> dict[str, list[T]]:
    """Return name of an arm -> its values, one for each repeat.

    The arms run all in order, then all in reverse, so that a machine that drifts favours none. After `deadline` (of
    time.monotonic()) no repeat is begun; with fewer than five done raises OutOfTime.
    """
    rounds: dict[str, list[T]] = {name: [] for name in arms}
    for done in range(repeats):
        if time.monotonic() > deadline:
            if done >= FEWEST:
                break
            raise OutOfTime(f"there was time for {done} repeats, and {FEWEST} are the fewest that say anything; give it "
                            "a larger --budget")
        for name in arms if done % 2 == 0 else reversed(list(arms)):
            rounds[name].append(arms[name]())
    return rounds


def interval(values: Sequence[float], statistic: Callable[..., Any] = np.median) -> Interval:
    """Return the median of `values`, or another statistic of numpy, with its 95 % bootstrap interval.

    The same values give the same interval. Raises ValueError for none.
    Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, percentile intervals.
    """
    if not values:
        raise ValueError("an interval needs at least one value, and there is none")
    found = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).choice(found, (DRAWS, len(found)))
    low, high = np.quantile(statistic(drawn, axis=1), [0.025, 0.975])
    return Interval(float(statistic(found)), float(low), float(high))


def noise_floor(control: Comparison) -> float:
    """Return how far from 1 the speed ratio of two equal arms lies, as a share. Raises ValueError without a speed."""
    if control.speed is None:
        raise ValueError(f"the control has no speed: {control.because}")
    return max(abs(control.speed.low - 1), abs(control.speed.high - 1))


def speed_verdict(speed: Interval, margin: float) -> tuple[str, str]:
    """Return verdict and reason of a ratio of speeds on a machine that varies by `margin` between equal arms.

    Faster or harmful: the interval excludes 1, by more than 2 % in the median; the machine's noise is in the interval
    already. No effect: the interval lies within the margin, or it excludes 1 by less than 2 %; a machine so noisy that the
    margin is above 5 % cannot say so. Everything else is inconclusive.
    """
    shown = f"{speed.median:.3f} times as fast ({speed.low:.3f} to {speed.high:.3f})"
    excludes_one = speed.low > 1 or speed.high < 1
    if excludes_one and speed.median > 1 + MARGIN:
        return FASTER, f"{shown}: more than {MARGIN:.0%}, and the interval excludes 1"
    if excludes_one and speed.median < 1 - MARGIN:
        return HARMFUL, f"{shown}: slower by more than {MARGIN:.0%}, and the interval excludes 1"
    within = speed.low >= 1 - margin and speed.high <= 1 + margin
    if not (within or excludes_one):
        return INCONCLUSIVE, f"{shown}: the interval holds 1 and reaches beyond the margin of {margin:.1%}"
    if margin > TOO_NOISY:
        return INCONCLUSIVE, f"{shown}: this machine cannot tell apart what differs by less than {margin:.1%}"
    return NO_EFFECT, f"{shown}: {'within' if within else 'an effect smaller than'} the margin of {margin:.1%}"
