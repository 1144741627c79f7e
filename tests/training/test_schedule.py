from __future__ import annotations

import math

import pytest

from powertrain.training.schedule import Schedule


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_it_warms_up_to_the_peak(kind: str) -> None:
    schedule = Schedule(kind, 1.0, 100, warmup_steps=10)
    rates = [schedule.at(step) for step in range(11)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == 1.0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_it_ends_at_the_given_share(kind: str) -> None:
    assert Schedule(kind, 2.0, 100, 10, min_rate=0.1).at(100) == pytest.approx(0.2)
    assert Schedule(kind, 2.0, 100, 10).at(100) == pytest.approx(0.0)
    assert Schedule(kind, 2.0, 100, 10, min_rate=0.1).at(10) == 2.0


def test_cosine_is_torchs_own() -> None:
    schedule = Schedule("cosine", 1.0, 40)
    assert [schedule.at(s) for s in range(40)] == pytest.approx([(1 + math.cos(math.pi * s / 40)) / 2 for s in range(40)])


def test_constant_stays() -> None:
    assert {Schedule("constant", 0.5, 10).at(step) for step in range(10)} == {0.5}


def test_a_run_of_one_step_has_a_rate() -> None:
    assert Schedule("cosine", 1.0, 1).at(0) == 1.0
