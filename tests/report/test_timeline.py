"""A run's events on one clock: nothing is lost and nothing is counted twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from made_runs import BEGAN, start, step, typed, whole_run

from powertrain.records import timeline


def read(events: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]] = ()) -> timeline.History:
    return timeline.read(typed(events), typed(written))


def test_the_parts_sum_to_the_wall_time_that_the_run_measured():
    events = whole_run()
    history = read(events)
    assert history.wall_s == pytest.approx(events[-1]["seconds"], abs=1e-9)
    assert sum(history.parts.values()) == pytest.approx(history.wall_s, abs=1e-9)
    assert history.parts["other"] == pytest.approx(0.25, abs=1e-6)
    assert history.parts["evaluation"] == pytest.approx(1.0)
    assert history.overrun_s == 0


def test_what_parts_a_step_does_not_name_is_other():
    history = read([start(BEGAN), step(1, BEGAN + 1, 1.0, parts={"forward": 0.4})])
    assert history.parts == pytest.approx({"forward": 0.4, "other": 0.6})


def test_steps_without_parts_are_not_split():
    history = read([start(BEGAN), step(1, BEGAN + 1, 1.0, parts={})])
    assert history.parts == pytest.approx({timeline.NOT_SPLIT: 1.0})


def test_the_clock_stands_still_between_a_kill_and_its_continuation():
    first, later = whole_run(10)[:11], BEGAN + 5000
    rest = [start(later, "resume", step=10, rejected=[]), *(step(n, later + 0.1 * (n - 10)) for n in range(11, 15)),
            {"event": "end", "time": later + 0.5, "reason": "finished", "step": 14, "seconds": 0.5}]
    history = read([*first, *rest])
    assert history.wall_s == pytest.approx(1.5 + 0.5)
    assert sum(history.parts.values()) == pytest.approx(history.wall_s)
    assert history.sessions == (0, 10)


def test_a_clock_of_the_day_that_is_set_back_takes_no_time_away():
    events = [start(BEGAN), step(1, BEGAN - 900), {"event": "evaluation", "time": BEGAN - 899, "step": 1, "final": True,
                                                   "loss": 4.0, "tokens": 9, "bits_per_byte": None, "seconds": 0.2}]
    assert read(events).wall_s == pytest.approx(0.3)


def test_steps_that_were_done_twice_count_once_and_are_told():
    lost = [step(n, BEGAN + n) for n in range(3, 6)]
    again = [step(n, BEGAN + 100 + n) for n in range(3, 6)]
    kept = [start(BEGAN), step(1, BEGAN + 1), step(2, BEGAN + 2), start(BEGAN + 100, "resume", step=2), *again]
    history = read(kept, [*kept[:3], *lost, *kept[3:]])
    assert (history.repeated_steps, history.repeated_s) == (3, pytest.approx(0.3))
    assert len(history.steps) == 5


def test_warm_up_ends_where_the_speed_is_reached_and_takes_a_quarter_of_a_session_at_most():
    assert timeline.warm_ups(read(whole_run())) == [range(1)]
    slow = [start(BEGAN), *(step(n, BEGAN + n, 1.0 if n <= 15 else 0.1) for n in range(1, 41))]
    assert timeline.warm_ups(read(slow)) == [range(10)]


def test_smoothing_leaves_gaps_where_values_are_not_finite():
    assert timeline.rolling_mean([1.0, math.nan, 3.0], 3) == [1.0, None, 3.0]
    assert timeline.rolling_median([1.0, 2.0, 900.0, 3.0, 4.0], 5)[2] == 3.0


def test_a_spike_leaves_no_trace_in_the_means_behind_it():
    assert timeline.rolling_mean([2.0] * 5 + [1e20] + [2.0] * 20, 5)[-15:] == [2.0] * 15
    assert timeline.rolling_mean([1e308] * 3, 3) == [1e308] * 3
    assert timeline.rolling_mean([3e5] * 100 + [1e-12] * 50, 21)[-30:] == pytest.approx([1e-12] * 30)


@pytest.mark.parametrize("steps", [1, 4, 5, 99])
def test_means_and_medians_are_those_of_the_finite_values_around(steps):
    found = [math.nan if number % 7 == 3 else None if number % 11 == 5 else (number * 37 % 23) / 3 for number in range(60)]
    near = [[value for value in found[max(0, place - steps // 2):place + steps // 2 + 1] if timeline.is_finite(value)]
            for place in range(len(found))]
    for rolling, middle in ((timeline.rolling_mean, statistics.fmean), (timeline.rolling_median, statistics.median)):
        expected = [middle(values) if timeline.is_finite(value) else None for value, values in zip(found, near, strict=True)]
        assert rolling(found, steps) == [value if value is None else pytest.approx(value) for value in expected]


def evaluated(*losses: float) -> list[dict[str, Any]]:
    events = [start(BEGAN)]
    for n, loss in enumerate(losses, 1):
        events += [step(n, BEGAN + n), {"event": "evaluation", "time": BEGAN + n + 0.1, "step": n, "loss": loss,
                                        "tokens": 100, "seconds": 0.1}]
    return events


def trend(*losses: float) -> str | None:
    found = timeline.held_out_trend(read(evaluated(*losses)))
    return found and found.trend


def test_held_out_losses_have_a_trend_from_three_on():
    assert trend(4.0, 3.0) is None
    assert [trend(4.0, 3.0, last) for last in (2.9, 2.99, 3.1)] == ["falling", "level", "risen"]


def test_an_evaluation_over_another_amount_of_text_does_not_compare():
    events = evaluated(4.0, 3.0, 2.99, 3.2)
    events[-1]["tokens"] = 9000
    found = timeline.held_out_trend(read(events))
    assert found == timeline.HeldOut(((1, 4.0), (2, 3.0), (3, 2.99)), (3, 2.99), "level")
