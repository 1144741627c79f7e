"""Statistics that one wild value does not move: of a loss curve or of step times, both noisy and with a trend.

Noise is read off the differences of neighbours, which a slow trend hardly enters; its unit is the standard deviation that
normal noise of that size would have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

MAD_TO_SIGMA = 1.4826        # of normal noise: its standard deviation over the median of its sizes
MEDIAN_ERROR = 1.2533        # sqrt(pi / 2): a median's standard error over that of a mean, of normal noise


def noise(values: Sequence[float]) -> float:
    """The standard deviation of what is not trend; 0 below three values."""
    if len(values) < 3:
        return 0.0
    differences = [abs(later - earlier) for earlier, later in itertools.pairwise(values)]
    return MAD_TO_SIGMA * median(differences) / math.sqrt(2)


def median_error(values: Sequence[float]) -> float:
    """The standard error of the values' median."""
    return MEDIAN_ERROR * noise(values) / math.sqrt(len(values))


def level(values: Sequence[float], at: int, width: int) -> float:
    """The median of at most `width` values that end before `at`, or begin there where that is the start."""
    return median(values[max(0, at - width):at] or values[:width])


def window(count: int) -> int:
    """So many steps make one level: a twentieth of the run, 5 to 50."""
    return min(50, max(5, count // 20))


def windows(values: Sequence[float], width: int) -> list[float]:
    """Medians of neighbouring groups of `width`; a rest that fills no group is left out."""
    return [median(values[first:first + width]) for first in range(0, len(values) - width + 1, width)]
