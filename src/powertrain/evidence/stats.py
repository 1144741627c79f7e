"""Statistics of repeated measurements: median with interval, noise floor, and the verdict on a ratio of speeds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from powertrain.records.evidence import FASTER, HARMFUL, INCONCLUSIVE, NO_EFFECT, Comparison, Interval

DRAWS = 4000                                 # of the bootstrap; its error is then well below the intervals' width
MARGIN = 0.02                                # a smaller effect is nobody's reason for anything
TOO_NOISY = 0.05                             # with a margin above this, "no effect" would be a claim that nobody checked


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
