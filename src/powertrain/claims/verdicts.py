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

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from powertrain.claims.claim import Claim, Experiment
from powertrain.claims.experiments import Outcome, reading
from powertrain.evidence.stats import MARGIN, TOO_NOISY
from powertrain.records import to_plain
from powertrain.records.evidence import (
    BETTER,
    CONFIRMED,
    HARMFUL,
    INCONCLUSIVE,
    INVALID,
    NO_EFFECT,
    SMALLER,
    Interval,
    Parity,
)

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
        claim = self.claim
        span = None if claim.range is None else [end if math.isfinite(end) else None for end in claim.range]
        return {"id": claim.id, "document": claim.document, "what": claim.what, "claimed": claim.claimed, "range": span,
                "unit": claim.unit, "better": claim.better, "measured": to_plain(self.measured), "verdict": self.verdict,
                "because": self.because, "prior": claim.prior, "experiment": claim.experiment, "metric": claim.metric,
                "conditions": self.conditions, "parity": to_plain(self.parity)}


def judge(claim: Claim, outcome: Outcome, floor: float | None) -> ClaimRow:
    """Return the verdict on one claim by its experiment."""
    experiment = outcome.experiment
    if outcome.failed is not None:
        return ClaimRow(claim, INCONCLUSIVE, f"it could not be measured: {outcome.failed}")
    if experiment.verdict is not None:
        return ClaimRow(claim, experiment.verdict, experiment.because)
    if outcome.bound is not None and outcome.comparison is None and not outcome.allocated_bytes:
        found = by_bound(claim, outcome.bound.times, " and ".join(outcome.bound.acts_on))
        assert found is not None, claim.id
        return ClaimRow(claim, *found, parity=outcome.parity)
    if outcome.comparison is not None and outcome.comparison.verdict == INVALID:
        return ClaimRow(claim, INCONCLUSIVE, f"a run had no speed: {outcome.comparison.because}", parity=outcome.parity)
    if outcome.parity is not None and not outcome.parity.holds:
        return ClaimRow(claim, INCONCLUSIVE, f"the arms do not learn the same: {outcome.parity.because}", parity=outcome.parity)
    measured = reading(claim, outcome)
    if measured is None:
        return ClaimRow(claim, INCONCLUSIVE, "the measurement gave no value", parity=outcome.parity)
    verdict, because = decide(claim, measured, noise_floor=floor)
    return ClaimRow(claim, verdict, _with_reason(because, experiment, outcome), measured, outcome.parity)


def _with_reason(because: str, experiment: Experiment, outcome: Outcome) -> str:
    if experiment.kind == "reasoned":
        return f"{because}. By arithmetic: {experiment.because}"
    if outcome.bound is None or not math.isfinite(outcome.bound.times):
        return because
    return f"{because}; at most {outcome.bound.times:.2f} times by Amdahl"


def decide(claim: Claim, measured: Interval, *, noise_floor: float | None) -> Verdict:
    """Return the verdict on a claim with its reason. `noise_floor` is a share; None where nothing was timed."""
    if not claim.is_ratio:
        return _of_figure(claim, measured)
    margin = min(max(MARGIN, noise_floor or 0.0), TOO_NOISY)
    return _of_nothing(claim, measured, margin) if _says_nothing_changes(claim) else _of_change(claim, measured, margin)


def by_bound(claim: Claim, bound: float, acts_on: str) -> Verdict | None:
    """Return "no effect" where the technique acts on too small a part of a step; None where the claim has to be timed."""
    claims_gain = claim.is_ratio and not claim.inverse and (claim.range is None or claim.range[0] > 1)
    if not claims_gain or bound - 1 >= MARGIN:
        return None
    return NO_EFFECT, (f"not timed: {acts_on} takes {1 - 1 / bound:.1%} of a step here, so without it a step would be at "
                       f"most {bound:.3f} times as fast (Amdahl)")


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


def _says_nothing_changes(claim: Claim) -> bool:
    return claim.range is not None and claim.range[0] <= 1 <= claim.range[1]


def _oriented(claim: Claim, value: float) -> float:
    return value if claim.better == "higher" else -value


def _span(claim: Claim) -> tuple[float, float]:
    """Return the claimed range, oriented so that more is better."""
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
    """Return the verdict on a claim that nothing is lost, or that nothing changes."""
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
