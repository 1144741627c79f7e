"""What a measured interval says of a claimed range. All timings are made up: the decision is tested, not the machine."""

import math

import pytest

from powertrain.claims.claim import Claim
from powertrain.claims.experiments import Bound
from powertrain.claims.verdicts import by_bound, claimed_range, decide, figure, shown
from powertrain.records.evidence import (
    BETTER,
    CONFIRMED,
    HARMFUL,
    INCONCLUSIVE,
    NO_EFFECT,
    SMALLER,
    Interval,
)


def claim(span=(1.05, 1.15), unit="times as fast", better="higher", **more):
    return Claim("000-x", "000", "a thing", "+10 %", span, unit, better, "an-experiment", "a prior", **more)


def verdict(median, low=None, high=None, *, floor=None, **about):
    low, high = low if low is not None else median - 0.005, high if high is not None else median + 0.005
    return decide(claim(**about), Interval(median, low, high), noise_floor=floor)[0]


@pytest.mark.parametrize(("median", "expected"), [
    (1.10, CONFIRMED), (1.045, SMALLER), (1.046, CONFIRMED), (1.20, BETTER), (1.03, SMALLER), (1.00, NO_EFFECT),
    (1.012, NO_EFFECT), (0.99, NO_EFFECT), (0.95, HARMFUL)])
def test_a_claimed_gain(median, expected):
    low, high = median - 0.004, median + 0.004
    assert verdict(median, low, high) == expected


def test_an_interval_that_holds_no_effect_and_the_claim_decides_nothing():
    assert verdict(1.05, 0.98, 1.12) == INCONCLUSIVE


def test_an_interval_around_1_that_is_wide_is_not_no_effect():
    assert verdict(1.0, 0.96, 1.04) == INCONCLUSIVE


def test_a_claim_smaller_than_the_margin_cannot_be_confirmed():
    assert verdict(1.015, 1.010, 1.019, span=(1.01, 1.03)) == NO_EFFECT


def test_a_noisy_machine_widens_the_margin_up_to_a_point():
    assert verdict(1.035, 1.03, 1.04) == SMALLER
    assert verdict(1.01, 0.98, 1.04) == INCONCLUSIVE
    assert verdict(1.01, 0.98, 1.04, floor=0.04) == NO_EFFECT
    assert verdict(1.01, 0.93, 1.06, floor=0.06) == INCONCLUSIVE
    assert verdict(1.10, 1.09, 1.11, floor=0.06) == CONFIRMED


@pytest.mark.parametrize(("median", "expected"), [
    (0.8, CONFIRMED), (0.7, BETTER), (0.9, SMALLER), (1.0, NO_EFFECT), (1.1, HARMFUL)])
def test_a_claimed_saving(median, expected):
    assert verdict(median, span=(0.75, 0.85), unit="times the memory", better="lower") == expected


@pytest.mark.parametrize(("median", "expected"), [(0.95, CONFIRMED), (0.8, HARMFUL), (1.0, NO_EFFECT), (1.1, BETTER)])
def test_a_claimed_cost(median, expected):
    found = decide(claim(span=(0.925, 0.975)), Interval(median, median - 0.01, median + 0.01), noise_floor=None)
    assert found[0] == expected
    assert ("it costs more than claimed" in found[1]) == (expected == HARMFUL)


@pytest.mark.parametrize(("median", "expected"), [(1.0, CONFIRMED), (0.99, CONFIRMED), (1.3, CONFIRMED), (0.9, HARMFUL)])
def test_a_claim_that_nothing_is_lost(median, expected):
    assert verdict(median, span=(1.0, math.inf)) == expected


def test_a_claim_that_nothing_is_lost_needs_a_narrow_interval():
    assert verdict(1.0, 0.9, 1.1, span=(1.0, math.inf)) == INCONCLUSIVE


@pytest.mark.parametrize(("median", "expected"), [(1.05, CONFIRMED), (1.0, NO_EFFECT), (0.9, HARMFUL)])
def test_a_claim_without_a_figure_says_any_gain(median, expected):
    assert verdict(median, span=None) == expected


def test_a_saving_without_a_figure_says_any_saving():
    assert verdict(0.9, span=None, unit="times the memory", better="lower") == CONFIRMED


@pytest.mark.parametrize(("median", "expected"), [(0.97, CONFIRMED), (0.5, SMALLER), (1.2, BETTER)])
def test_a_figure_that_is_no_ratio(median, expected):
    assert verdict(median, span=(0.95, 1.0), unit="of the time busy") == expected


def test_a_figure_that_scatters_too_much_decides_nothing():
    assert verdict(50.0, 20.0, 80.0, span=(45, 60), unit="seconds", better="lower") == INCONCLUSIVE
    assert verdict(126.0, 105.0, 147.0, span=(45, 60), unit="seconds", better="lower") == SMALLER


def test_a_bound_below_the_margin_is_no_effect():
    found = by_bound(Bound(1.004, ("optimizer",)))
    assert found[0] == NO_EFFECT
    assert "optimizer takes 0.4% of a step" in found[1]


def test_a_cost_or_a_claim_turned_round_claims_no_gain():
    assert claim().claims_gain
    assert not claim(span=(0.9, 0.95)).claims_gain
    assert not claim(inverse=True).claims_gain


def test_figures_are_readable():
    assert [figure(value) for value in (1.0123, 0.5, 3.14159, 12345.0)] == ["1.012", "0.5", "3.14", "12,345"]
    assert shown(claim(), Interval(1.02, 1.01, 1.03)) == "1.020 times as fast (1.010 to 1.030)"
    assert claimed_range(claim(span=(1.0, math.inf))) == "1 or more"
    assert claimed_range(claim(span=(1000, 2000))) == "1,000 to 2,000"
    assert claimed_range(claim(span=None)) == "a gain"
