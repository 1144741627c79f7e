"""How long a whole run takes: the arithmetic, with step times that were made up."""

from __future__ import annotations

import pytest
from observations import STEP_S, seen

from powertrain.diagnosis.observed import Between
from powertrain.diagnosis.verdict import NARROWEST, forecast, mean_interval


def test_a_run_is_its_start_its_steps_its_pauses_and_its_end() -> None:
    observed = seen(steps=100, evaluation=Between("eval_steps", 2.0, 30), checkpoint=Between("save_steps", 1.0, 100),
                    recompile_s=4.0)
    found = forecast(observed, start_s=3.0, last_s=0.5)
    assert found.parts == pytest.approx({"start-up": 3.0, "steps": 100 * STEP_S, "evaluation": 6.0, "recompilation": 4.0,
                                         "the end": 0.5})           # the checkpoint is that of the end
    assert found.seconds.median == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_s == pytest.approx(observed.real_tokens / STEP_S)


def test_only_the_steps_are_uncertain() -> None:
    found = forecast(seen(steps=1000), start_s=50.0, last_s=7.0)
    assert found.seconds.low == pytest.approx(57.0 + 1000 * STEP_S * (1 - NARROWEST))
    assert found.seconds.high == pytest.approx(57.0 + 1000 * STEP_S * (1 + NARROWEST))


def test_a_price_of_an_hour_is_paid_for_the_hours_of_the_interval() -> None:
    found = forecast(seen(steps=36_000), start_s=0.0, last_s=0.0, price_per_hour=2.0)
    assert found.cost is not None
    assert (found.cost.median, found.cost.low, found.cost.high) == pytest.approx((2.0, 1.94, 2.06))
    assert forecast(seen(), start_s=0.0, last_s=0.0).cost is None


def test_energy_is_said_only_where_the_processors_tell_their_power() -> None:
    assert forecast(seen(), start_s=0.0, last_s=0.0).energy_kwh is None
    found = forecast(seen(steps=36_000), start_s=0.0, last_s=0.0, watts=150.0)
    assert found.energy_kwh == pytest.approx(0.15)


def test_steps_of_very_unequal_length_make_a_wide_interval_around_their_mean() -> None:
    even, uneven = mean_interval([0.2] * 20), mean_interval([0.1, 0.3] * 10)
    assert (even.median, uneven.median) == pytest.approx((0.2, 0.2))
    assert even.high - even.low == pytest.approx(2 * NARROWEST * 0.2)
    assert 2 * (even.high - even.low) < uneven.high - uneven.low
    assert uneven.low < 0.2 < uneven.high


def test_the_same_steps_give_the_same_interval() -> None:
    assert mean_interval([0.1, 0.3, 0.2]) == mean_interval([0.1, 0.3, 0.2])
