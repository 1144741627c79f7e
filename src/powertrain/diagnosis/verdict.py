"""The verdict on a run: the bounds that hold it back, their shares of its time, and the gain of curing each.

All shares are of the average wall time of a step over the whole run, with its part of evaluations, checkpoints and logging.
Shares may overlap: padding is computed in products too. Curing a cause with share s makes the run at most 1 / (1 - s) times
as fast (Amdahl 1967). The *predicted* gain of its cure is smaller: it is measured where the cure was tried in a probe, and
else given by a formula on the measured parts, which is named.

Causes are ranked by the predicted gain of their cures. Causes without a cure come last, the largest share first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from powertrain.diagnosis.observed import Bound, Observed, Remedy
from powertrain.diagnosis.wording import sentences
from powertrain.evidence.stats import interval
from powertrain.records.evidence import Interval
from powertrain.records.findings import Cure, Evidence

WORTH_SHARE = 0.02           # of the wall time: a cause with a smaller share is not named
WORTH_GAIN = 1.02            # times as fast: a smaller predicted gain ranks as no gain
AFFORDABLE = 0.02            # of the wall time, for each of evaluating, saving and logging
LARGEST_BOUND = 100.0        # times as fast: the largest bound that is reported
NARROWEST = 0.03             # an interval reaches at least so far to either side: no run repeats exactly


@dataclass(frozen=True)
class Cause:
    name: Bound
    share: float                             # of the wall time
    bound: float                             # without it the run is at most this many times as fast
    evidence: tuple[Evidence, ...]
    cure: Cure
    predicted: float                         # times as fast the cure is predicted to make the run; 1 where there is none
    basis: str = "none"                      # of the prediction
    tried: bool = False                      # the cure was tried in a few steps


def causes(observed: Observed) -> list[Cause]:
    """Return the causes with a share worth naming, the largest predicted gain first. Never empty."""
    most = max(observed.shares, key=lambda name: observed.shares[name])
    found = [_cause(name, observed) for name, share in observed.shares.items() if share >= WORTH_SHARE or name == most]
    return sorted(found, key=lambda cause: (-cause.predicted if cause.predicted >= WORTH_GAIN else -1.0, -cause.share))


def amdahl(share: float) -> float:
    """Return how many times as fast a run is at most without the work that takes `share` of its time."""
    return LARGEST_BOUND if share >= 1 - 1 / LARGEST_BOUND else 1 / (1 - max(0.0, share))


def predicted_speed(remedy: Remedy, observed: Observed) -> float:
    """Return how many times as fast the whole run becomes; the work between steps stays as it is."""
    if remedy.speed is not None:
        return observed.wall_s / (observed.wall_s - observed.mean_step_s + observed.mean_step_s / remedy.speed)
    return 1.0 if remedy.kept is None else amdahl(observed.shares.get(remedy.against, 0.0) * (1 - remedy.kept))


def promise_of(remedy: Remedy, observed: Observed) -> float:
    """Return the largest possible gain of an untried remedy: by its formula, or by the bound of its cause."""
    unknown = remedy.kept is None
    return amdahl(observed.shares.get(remedy.against, 0.0)) if unknown else predicted_speed(remedy, observed)


def _cause(name: Bound, observed: Observed) -> Cause:
    """Return a bound as a cause: with its interval, its best remedy (tried ones first), or the advice where there is none."""
    share = observed.shares[name]
    against = [remedy for remedy in observed.remedies if remedy.against == name]
    tried = False
    if name in observed.between:
        cure, predicted, basis = _less_often(name, observed)
    elif against:
        best = max(against, key=lambda one: (one.speed is not None, predicted_speed(one, observed)))
        cure, predicted, basis, tried = best.cure, predicted_speed(best, observed), best.basis, best.speed is not None
    else:
        advice, predicted, basis = sentences()["bound"][name.name.lower()]["advice"], 1.0, "none"
        if name == Bound.BUSY:               # the other processes give their time back when they end
            predicted, basis = amdahl(share), "formula: the time that other processes took, measured"
        if name == Bound.THROTTLING:
            advice += f": {observed.throttled_by or 'heat or power of the machine'}"
            predicted, basis = amdahl(share), "formula: the time lost to it, measured"
        cure = Cure(advice)
    return Cause(name, share, amdahl(share), (Evidence(observed.evidence(name)),), cure, max(1.0, predicted), basis, tried)


def _less_often(name: Bound, observed: Observed) -> tuple[Cure, float, str]:
    """Return the interval at which the work takes an affordable share, at most half of the run."""
    between = observed.between[name]
    verb = sentences()["bound"][name.name.lower()]["advice"].partition(" ")[0]           # "evaluate" less often
    steps, others_s = observed.steps, observed.wall_s - between.per_step_s(observed.steps)
    affordable = _round_number(between.seconds / (AFFORDABLE * others_s)) if others_s > 0 else steps
    every = max(between.every, min(affordable, max(1, steps // 2)))
    rarer = replace(between, every=every).per_step_s(steps)
    if every == between.every:               # the interval is not the problem: the run is short, or each time takes long
        return Cure(f"train longer, or make each time shorter: to {verb} every {every:,} of {steps:,} steps is not too "
                    "often"), 1.0, "none"
    return (Cure(f"{verb} every {every:,} steps instead of every {between.every:,}", words=(f"{between.key}={every}",)),
            observed.wall_s / (others_s + rarer),
            f"formula: {between.seconds:.3g} s each time, measured; then {rarer / (others_s + rarer):.1%} of the run")


def _round_number(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least `least`."""
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, least))))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


# ------------------------------------------------------------------------------------------------ the forecast


@dataclass(frozen=True)
class Forecast:
    """The time of the whole run, its parts, and its cost, as the recipe stands."""

    steps: int
    step_s: Interval                         # of a step on average
    seconds: Interval                        # of the run
    parts: Mapping[str, float]               # the median by what it goes into: start-up, steps, evaluation, ...
    tokens_per_s: float                      # real ones, while it trains
    cost: Interval | None = None             # in the unit of the price; None where none was given
    energy_kwh: float | None = None          # of the processors; None where nobody tells


def forecast(observed: Observed, *, start_s: float, last_s: float, price_per_hour: float | None = None,
             watts: float | None = None) -> Forecast:
    """Return the forecast of a run.

    `start_s`: everything before the steps run at their usual speed. `last_s`: everything after the last step.
    """
    step_s = mean_interval(observed.step_s)
    parts = {"start-up": start_s, "steps": observed.steps * step_s.median,
             **{str(name): part.per_step_s(observed.steps) * observed.steps for name, part in observed.between.items()},
             "recompilation": observed.recompile_s, "the end": last_s}
    fixed_s = sum(parts.values()) - parts["steps"]
    seconds = Interval(*(fixed_s + observed.steps * value for value in astuple(step_s)))
    cost = None if price_per_hour is None else Interval(*(price_per_hour * value / 3600 for value in astuple(seconds)))
    return Forecast(observed.steps, step_s, seconds, {name: part_s for name, part_s in parts.items() if part_s},
                    observed.real_tokens / step_s.median, cost, None if watts is None else watts * seconds.median / 3.6e6)


def mean_interval(step_s: Sequence[float]) -> Interval:
    """Return the mean seconds of a step, with the 95 % bootstrap interval of that mean, never narrower than NARROWEST."""
    found = interval(step_s, np.mean)
    least, most = found.median * (1 - NARROWEST), found.median * (1 + NARROWEST)
    return replace(found, low=min(found.low, least), high=max(found.high, most))
