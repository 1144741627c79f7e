"""What a measurement says of a claim: the claimed range against the measured interval.

confirmed             the interval overlaps the claimed range
better                it lies beyond the range, on the good side
smaller than claimed  it lies short of the range, and still is a gain (or, of a plain figure, is worse than claimed)
no effect             it differs from 1 by less than the margin, and is narrower than that
harmful               it is worse than 1; or, where a cost is claimed, costs more
inconclusive          it is too wide to say, or the machine too noisy, or a run had no speed or learned something else
not applicable here   the claim needs what this machine does not have

The margin is what nothing below is called an effect: 2 %, or this machine's noise floor where that is larger.
"""

from __future__ import annotations

import math

from powertrain.claims.claim import Claim
from powertrain.evidence.stats import MARGIN, TOO_NOISY
from powertrain.records.evidence import BETTER, CONFIRMED, HARMFUL, INCONCLUSIVE, NO_EFFECT, SMALLER, Interval

TOO_WIDE = 0.25              # half-width of a plain figure, as a share of it, that no longer says much
Verdict = tuple[str, str]    # one of the words above, and why


def decide(claim: Claim, measured: Interval, *, noise_floor: float | None) -> Verdict:
    """The verdict on a claim, with the numbers in words. `noise_floor` is a share; None where nothing was timed."""
    if not claim.is_ratio:
        return _of_figure(claim, measured)
    margin = min(max(MARGIN, noise_floor or 0.0), TOO_NOISY)
    return _of_nothing(claim, measured, margin) if _says_nothing_changes(claim) else _of_change(claim, measured, margin)


def by_bound(claim: Claim, bound: float, acts_on: str) -> Verdict | None:
    """No effect, where what the technique acts on is too little of a step to matter; None where it has to be timed."""
    claims_gain = claim.is_ratio and not claim.inverse and (claim.range is None or claim.range[0] > 1)
    if not claims_gain or bound - 1 >= MARGIN:
        return None
    return NO_EFFECT, (f"not timed: {acts_on} is {1 - 1 / bound:.1%} of a step here, so that even for nothing it would be "
                       f"{bound:.3f} times as fast at most (Amdahl)")


def shown(claim: Claim, measured: Interval) -> str:
    """1.02 times as fast (1.01 to 1.03)."""
    exact = measured.low == measured.high
    return f"{figure(measured.median)} {claim.unit}" + (
        "" if exact else f" ({figure(measured.low)} to {figure(measured.high)})")


def figure(value: float) -> str:
    """Three significant digits, more where a ratio is close to 1."""
    if 0.9 < value < 1.1:
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def claimed_range(claim: Claim) -> str:
    if claim.range is None:
        return "a gain"
    low, high = claim.range
    if math.isinf(high):
        return f"{low:,g} or more"
    return f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"


def _says_nothing_changes(claim: Claim) -> bool:
    return claim.range is not None and claim.range[0] <= 1 <= claim.range[1]


def _oriented(claim: Claim, value: float) -> float:
    return value if claim.better == "higher" else -value


def _span(claim: Claim) -> tuple[float, float]:
    """The claimed range such that more is better."""
    if claim.range is None:
        return _oriented(claim, 1.0), math.inf
    low, high = sorted(_oriented(claim, end) for end in claim.range)
    return low, high


def _ends(claim: Claim, measured: Interval) -> tuple[float, float]:
    low, high = sorted((_oriented(claim, measured.low), _oriented(claim, measured.high)))
    return low, high


def _of_change(claim: Claim, measured: Interval, margin: float) -> Verdict:
    (low, high), (worst, best) = _ends(claim, measured), _span(claim)
    one, middle = _oriented(claim, 1.0), _oriented(claim, measured.median)
    said = f"{shown(claim, measured)}, claimed {claimed_range(claim)}"
    differs = (low > one or high < one) and abs(middle - one) > MARGIN
    if not differs and (high - low) / 2 < margin:
        return NO_EFFECT, f"{said}; less than {margin:.1%} is no effect here"
    if not differs:
        return INCONCLUSIVE, f"{said}; the interval is too wide to tell it from no effect"
    if low <= best and high >= worst:
        return CONFIRMED, said
    if low > best:
        return BETTER, said
    if best <= one:
        return HARMFUL, f"{said}: it costs more than claimed"
    return (SMALLER, said) if middle > one else (HARMFUL, said)


def _of_nothing(claim: Claim, measured: Interval, margin: float) -> Verdict:
    """The claim says that nothing is lost, or that nothing changes."""
    (low, high), (worst, best) = _ends(claim, measured), _span(claim)
    said = f"{shown(claim, measured)}, claimed {claimed_range(claim)}"
    middle = _oriented(claim, measured.median)
    if worst - margin <= middle <= best + margin:
        wide = (low < worst - margin and high > worst) or (high > best + margin and low < best)
        return (INCONCLUSIVE, f"{said}; the interval is too wide") if wide else (CONFIRMED, said)
    if low <= best and high >= worst:
        return INCONCLUSIVE, f"{said}; the interval is too wide"
    return (BETTER, said) if middle > best else (HARMFUL, said)


def _of_figure(claim: Claim, measured: Interval) -> Verdict:
    (low, high), (worst, best) = _ends(claim, measured), _span(claim)
    said = f"{shown(claim, measured)}, claimed {claimed_range(claim)}"
    if low <= best and high >= worst:
        inside = low >= worst and high <= best
        wide = (high - low) / 2 > TOO_WIDE * abs(measured.median)
        return (INCONCLUSIVE, f"{said}; the interval is too wide") if wide and not inside else (CONFIRMED, said)
    return (BETTER, said) if low > best else (SMALLER, f"{said}: worse than claimed")
