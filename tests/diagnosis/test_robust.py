"""Statistics that a wild value or a trend does not move."""

from __future__ import annotations

import random

import pytest

from powertrain.diagnosis.curves import level, median_error, noise, window, windows


def noisy(count: int, sigma: float, slope: float = 0.0) -> list[float]:
    draw = random.Random(7)
    return [slope * at + draw.gauss(0, sigma) for at in range(count)]


@pytest.mark.parametrize("slope", [0.0, 0.02, -0.02])
def test_noise_is_the_standard_deviation_without_the_trend(slope: float):
    assert noise(noisy(2000, 0.1, slope)) == pytest.approx(0.1, rel=0.1)


def test_a_wild_value_is_not_noise():
    values = noisy(200, 0.1)
    wild = [*values[:100], 1e6, *values[100:]]
    assert noise(wild) == pytest.approx(noise(values), rel=0.1)


def test_fewer_than_three_values_have_no_noise():
    assert noise([1.0, 9.0]) == 0


def test_a_median_is_the_surer_the_more_values_it_has():
    assert median_error(noisy(1600, 0.1)) == pytest.approx(median_error(noisy(400, 0.1)) / 2, rel=0.2)


def test_a_level_ends_before_its_place():
    assert level([1.0, 1.0, 1.0, 9.0, 9.0, 9.0], 3, 2) == 1.0
    assert level([1.0, 1.0, 9.0], 0, 2) == 1.0


def test_windows_leave_a_rest_out():
    assert windows([1.0, 2.0, 3.0, 7.0, 8.0, 9.0, 100.0], 3) == [2.0, 8.0]
    assert (window(10), window(400), window(10_000)) == (5, 20, 50)
