"""The verdict on a claim: its claimed range against the measured interval.

confirmed             the interval overlaps the claimed range
better                the interval lies beyond the range, on the good side
smaller than claimed  the interval lies short of the range, and still is a gain (or a plain figure is worse than claimed)
no effect             the interval differs from 1 by less than the margin, and is narrower than the margin
harmful               the interval is worse than 1; or the cost is higher than claimed
inconclusive          the interval is too wide, the machine too noisy, or a run had no speed or learned something else
not applicable here   this machine lacks a part that the claim needs

The margin is 2 %, or this machine's noise floor where that is larger: smaller differences are no effect.
"""

import math
from dataclasses import dataclass
from typing import Any

from powertrain.claims.claim import Claim
from powertrain.claims.experiments import Bound, Outcome, reading
from powertrain.evidence.stats import MARGIN, TOO_NOISY
from powertrain.records import to_plain
from powertrain.records.evidence import BETTER, CONFIRMED, HARMFUL, INCONCLUSIVE, INVALID, NO_EFFECT, SMALLER, Interval, Parity

TOO_WIDE = 0.25              # half-width of a plain figure over the figure, from which the verdict is inconclusive
Verdict = tuple[str, str]    # one of the words above, and why


@dataclass(frozen=True)
class ClaimRow:
    """One claim's row of a study."""

    claim: Claim
    verdict: str
    because: str
    measured: Interval | None = None
    parity: Parity | None = None
    conditions: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**self.claim.to_json(), "verdict": self.verdict, "because": self.because, "conditions": self.conditions,
                "measured": to_plain(self.measured), "parity": to_plain(self.parity)}


def judge(claim: Claim, outcome: Outcome, floor: float | None) -> ClaimRow:
    """Return the verdict on one claim by its experiment."""
    experiment, comparison, parity = outcome.experiment, outcome.comparison, outcome.parity
    measured = None
    if outcome.failed is not None:
        verdict, because = INCONCLUSIVE, f"it could not be measured: {outcome.failed}"
    elif experiment.verdict is not None:
        verdict, because = experiment.verdict, experiment.because
    elif outcome.bound is not None and comparison is None and not outcome.allocated_bytes:
        verdict, because = by_bound(outcome.bound)
    elif comparison is not None and comparison.verdict == INVALID:
        verdict, because = INCONCLUSIVE, f"a run had no speed: {comparison.because}"
    elif parity is not None and not parity.holds:
        verdict, because = INCONCLUSIVE, f"the arms do not learn the same: {parity.because}"
    elif (measured := reading(claim, outcome)) is None:
        verdict, because = INCONCLUSIVE, "the measurement gave no value"
    else:
        verdict, because = decide(claim, measured, noise_floor=floor)
        if experiment.kind == "reasoned":
            because += f". By arithmetic: {experiment.because}"
        elif outcome.bound is not None and math.isfinite(outcome.bound.times):
            because += f"; at most {outcome.bound.times:.2f} times by Amdahl"
    return ClaimRow(claim, verdict, because, measured, parity)


def by_bound(bound: Bound) -> Verdict:
    """Return "no effect" for a technique that acts on too small a part of a step to be timed."""
    return NO_EFFECT, (f"not timed: {' and '.join(bound.acts_on)} takes {1 - 1 / bound.times:.1%} of a step here, so without "
                       f"it a step would be at most {bound.times:.3f} times as fast (Amdahl)")


def decide(claim: Claim, measured: Interval, *, noise_floor: float | None) -> Verdict:
    """Return the verdict on a claim with its reason. `noise_floor` is a share; None where nothing was timed."""
    sign = 1.0 if claim.better == "higher" else -1.0         # more is better in all numbers below
    low, middle, high = sorted((sign * measured.low, sign * measured.median, sign * measured.high))
    worst, best = (sign, math.inf) if claim.range is None else sorted(sign * end for end in claim.range)
    said = f"{shown(claim, measured)}, claimed {claimed_range(claim)}"
    overlaps = low <= best and high >= worst
    too_wide = INCONCLUSIVE, f"{said}; the interval is too wide"
    if not claim.is_ratio:
        is_wide = (high - low) / 2 > TOO_WIDE * abs(middle) and not (low >= worst and high <= best)
        if overlaps:
            return too_wide if is_wide else (CONFIRMED, said)
        return (BETTER, said) if low > best else (SMALLER, f"{said}: worse than claimed")

    margin = min(max(MARGIN, noise_floor or 0.0), TOO_NOISY)
    if claim.range is not None and worst <= sign <= best:    # the claim is that nothing is lost, or that nothing changes
        is_wide = (low < worst - margin and high > worst) or (high > best + margin and low < best)
        if worst - margin <= middle <= best + margin:
            return too_wide if is_wide else (CONFIRMED, said)
        if overlaps:
            return too_wide
        return (BETTER if middle > best else HARMFUL), said

    differs = (low > sign or high < sign) and abs(middle - sign) > MARGIN
    if not differs and (high - low) / 2 < margin:
        return NO_EFFECT, f"{said}; less than {margin:.1%} is no effect here"
    if not differs:
        return INCONCLUSIVE, f"{said}; the interval is too wide to tell it from no effect"
    if overlaps:
        return CONFIRMED, said
    if low > best:
        return BETTER, said
    if best <= sign:
        return HARMFUL, f"{said}: it costs more than claimed"
    return (SMALLER if middle > sign else HARMFUL), said


def shown(claim: Claim, measured: Interval) -> str:
    """Return a measurement as text: 1.02 times as fast (1.01 to 1.03)."""
    exact = measured.low == measured.high
    return f"{figure(measured.median)} {claim.unit}" + (
        "" if exact else f" ({figure(measured.low)} to {figure(measured.high)})")


def figure(value: float) -> str:
    """Return three significant digits, more where a ratio is close to 1."""
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
