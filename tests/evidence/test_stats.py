"""Intervals and verdicts, on synthetic timings: nothing here looks at a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from powertrain.evidence.clock import Pace, enough_pairs, ratios
from powertrain.evidence.stats import interval, noise_floor, speed_verdict
from powertrain.records.evidence import FASTER, HARMFUL, INCONCLUSIVE, NO_EFFECT, Comparison, Interval, Window

WINDOW = Window(1, 10, 1.0, 900, 1000, 0, {})


@pytest.mark.parametrize(("speed", "margin", "verdict"), [
    (Interval(1.10, 1.07, 1.13), 0.02, FASTER),
    (Interval(0.91, 0.89, 0.93), 0.02, HARMFUL),
    (Interval(1.00, 0.99, 1.015), 0.02, NO_EFFECT),
    (Interval(1.01, 1.005, 1.04), 0.02, NO_EFFECT),          # there is one, too small for anybody
    (Interval(1.01, 0.97, 1.035), 0.04, NO_EFFECT),          # as far apart as equal arms are here
    (Interval(1.05, 1.01, 1.09), 0.12, FASTER),              # the noise is in the interval already
    (Interval(1.00, 0.97, 1.01), 0.02, INCONCLUSIVE),
    (Interval(1.10, 0.98, 1.22), 0.02, INCONCLUSIVE),
    (Interval(1.01, 0.93, 1.08), 0.12, INCONCLUSIVE),        # so noisy a machine cannot say that there is nothing
    (Interval(1.20, 1.15, 1.25), 0.12, FASTER),
])
def test_the_verdict_follows_from_the_interval_and_the_margin(speed: Interval, margin: float, verdict: str) -> None:
    found, because = speed_verdict(speed, margin)
    assert found == verdict
    assert f"{speed.median:.3f}" in because
    assert f"{margin:.1%}" in because or verdict in (FASTER, HARMFUL)


def test_an_interval_holds_the_median_and_is_the_same_each_time() -> None:
    values = [1.0, 1.02, 0.99, 1.3, 1.01, 1.0]
    found = interval(values)
    assert found.low <= found.median == np.median(values) <= found.high
    assert interval(values) == found
    assert interval([2.0]) == Interval(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="at least one value"):
        interval([])


def test_one_slow_pair_of_many_moves_nothing() -> None:
    assert interval([1.0, 1.001, 0.999, 1.002, 0.998, 1.0, 1.001, 3.0]).median == pytest.approx(1, abs=0.002)


def test_the_noise_floor_is_the_farthest_that_equal_arms_may_lie_apart() -> None:
    control = Comparison("plan", "plan again", Interval(1.0, 0.985, 1.03), 6, NO_EFFECT, "", (1, 1), (1, 1))
    assert noise_floor(control) == pytest.approx(0.03)
    with pytest.raises(ValueError, match="no speed"):
        noise_floor(replace(control, speed=None))


def measured(speed: float, noise: float, seed: int, margin: float = 0.02) -> tuple[str, Interval]:
    """A verdict on arm B, `speed` times as fast, on a noisy machine with slow episodes, by the clock's own decisions.

    Windows take turns A B B A on one time line. A window is off by `noise` (standard deviation); one in twenty begins an
    episode, in which everything takes up to 1.8 times as long for up to nine windows: it hits both arms.
    """
    draw, pace = np.random.default_rng(seed), Pace()
    slowness: list[float] = []
    while len(slowness) < 2 * pace.most_pairs:
        slowness += [draw.uniform(1.1, 1.8)] * draw.integers(1, 10) if draw.random() < 0.05 else [1.0]
    windows: tuple[list[Window], list[Window]] = ([], [])
    while not enough_pairs(*windows, pace, margin, None):
        for arm in (0, 1) if len(windows[0]) % 2 == 0 else (1, 0):
            seconds = slowness[sum(map(len, windows))] * float(np.exp(draw.normal(0, noise))) / (speed if arm else 1)
            windows[arm].append(replace(WINDOW, seconds=seconds))
    found = interval(ratios(*windows))
    return speed_verdict(found, margin)[0], found


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_a_technique_that_makes_a_step_ten_percent_slower_is_called_harmful(noise: float) -> None:
    assert {measured(1 / 1.1, noise, seed)[0] for seed in range(40)} == {HARMFUL}


@pytest.mark.parametrize("noise", [0.005, 0.01])
def test_equal_arms_have_no_effect_on_each_other(noise: float) -> None:
    assert {measured(1.0, noise, seed)[0] for seed in range(40)} == {NO_EFFECT}


def test_on_a_noisy_machine_equal_arms_are_hardly_ever_told_apart() -> None:
    verdicts = Counter(measured(1.0, 0.03, seed)[0] for seed in range(60))
    assert verdicts[FASTER] + verdicts[HARMFUL] <= 4, verdicts


def test_the_interval_holds_the_truth_nine_times_in_ten_although_it_decides_when_to_stop() -> None:
    held = sum(found.low <= 1.0 <= found.high for found in (measured(1.0, 0.02, seed)[1] for seed in range(60)))
    assert held >= 54
