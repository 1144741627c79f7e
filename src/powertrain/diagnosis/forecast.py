"""How long the whole run takes, and what that costs: the probe's figures, once for each time that they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from powertrain.diagnosis.observed import Observed
from powertrain.evidence.stats import DRAWS
from powertrain.records.evidence import Interval

NARROWEST = 0.03             # an interval reaches at least so far to either side: no run repeats exactly


@dataclass(frozen=True)
class Forecast:
    """Of the whole run, as the recipe stands."""

    steps: int
    step_s: Interval                         # of a step on average
    seconds: Interval                        # of the run
    parts: Mapping[str, float]               # the median by what it goes into: start-up, steps, evaluation, ...
    tokens_per_s: float                      # real ones, while it trains
    cost: Interval | None = None             # in the unit of the price; None where none was given
    energy_kwh: float | None = None          # of the processors; None where nobody tells


def forecast(observed: Observed, *, start_s: float, last_s: float, price_per_hour: float | None = None,
             watts: float | None = None) -> Forecast:
    """`start_s`: everything before the run's steps run at their speed. `last_s`: everything after the last one."""
    step_s = mean_interval(observed.step_s)
    parts = {"start-up": start_s, "steps": observed.steps * step_s.median,
             **{str(name): part.per_step_s(observed.steps) * observed.steps for name, part in observed.between.items()},
             "recompilation": observed.recompile_s, "the end": last_s}
    fixed_s = sum(parts.values()) - parts["steps"]
    seconds = Interval(*((fixed_s + observed.steps * value) for value in (step_s.median, step_s.low, step_s.high)))
    cost = None if price_per_hour is None else Interval(*(price_per_hour * value / 3600 for value in (
        seconds.median, seconds.low, seconds.high)))
    return Forecast(observed.steps, step_s, seconds, {name: part_s for name, part_s in parts.items() if part_s},
                    observed.real_tokens / step_s.median, cost, None if watts is None else watts * seconds.median / 3.6e6)


def mean_interval(step_s: Sequence[float]) -> Interval:
    """The mean of a step's seconds, and where that of a whole run is likely to lie: 95 % of means of samples drawn anew."""
    found = np.asarray(step_s, dtype=np.float64)
    mean = float(found.mean())
    drawn = np.random.default_rng(0).choice(found, (DRAWS, len(found))).mean(axis=1)
    low, high = (float(bound) for bound in np.quantile(drawn, [0.025, 0.975]))
    return Interval(mean, min(low, mean * (1 - NARROWEST)), max(high, mean * (1 + NARROWEST)))
