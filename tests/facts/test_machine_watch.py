"""Whose work kept the processors busy: from counters that a test says, and once from the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from powertrain.facts.machine_watch import MachineWatch, Meanwhile, energy_j, held_s, taken_j


def test_a_process_that_uses_all_its_threads_was_robbed_of_nothing() -> None:
    assert Meanwhile(wall_s=10.0, own_s=20.0, busy_s=20.0).stolen_share(threads=2, cores=2) == 0.0


def test_time_that_others_took_is_a_share_of_the_computing_threads_time() -> None:
    half = Meanwhile(wall_s=10.0, own_s=10.0, busy_s=20.0)       # one of two cores went to somebody else
    assert half.others_cores == pytest.approx(1.0)
    assert half.stolen_share(threads=2, cores=2) == pytest.approx(0.5)


def test_others_on_an_idle_core_take_nothing() -> None:
    assert Meanwhile(wall_s=10.0, own_s=10.0, busy_s=20.0).stolen_share(threads=1, cores=2) == 0.0


def test_waiting_for_data_is_not_called_others_work() -> None:
    waiting = Meanwhile(wall_s=10.0, own_s=2.0, busy_s=2.5)
    assert waiting.others_cores == 0.0                           # a machine is never quite idle
    assert waiting.stolen_share(threads=2, cores=2) == 0.0


def test_never_more_is_stolen_than_the_process_lacks() -> None:
    assert Meanwhile(wall_s=10.0, own_s=19.0, busy_s=39.0).stolen_share(threads=2, cores=2) == pytest.approx(0.05)


def test_the_longer_of_two_limits_is_named() -> None:
    share, what = Meanwhile(wall_s=10.0, own_s=5.0, busy_s=5.0, host_s=1.0, held_s=8.0).throttled(cores=2)
    assert (share, what) == (pytest.approx(0.4), "the CPU quota of the control group")
    assert "hypervisor" in Meanwhile(10.0, 5.0, 5.0, host_s=3.0).throttled(cores=2)[1]


def test_nothing_is_divided_by_no_time() -> None:
    never = Meanwhile(0.0, 0.0, 0.0)
    assert (never.others_cores, never.stolen_share(2, 2), never.throttled(2)[0]) == (0.0, 0.0, 0.0)


def test_both_versions_of_control_groups_tell_how_long_they_held_a_process(tmp_path: Path) -> None:
    for name, text in (("two", "usage_usec 9\nthrottled_usec 2500000\n"), ("one", "nr_periods 3\nthrottled_time 1500000000\n"),
                       ("odd", "no two words\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpu.stat").write_text(text)
    assert held_s([tmp_path / "two"]) == pytest.approx(2.5)
    assert held_s([tmp_path / "one"]) == pytest.approx(1.5)
    assert held_s([tmp_path / "one", tmp_path / "two", tmp_path / "odd", tmp_path / "missing"]) == pytest.approx(2.5)


@pytest.mark.parametrize(("before", "after", "taken"), [
    (5.0, 7.5, 2.5), (5.0, 5.0, 0.0), (262_000.0, 40.0, None), (None, 3.0, None), (3.0, None, None)])
def test_energy_is_unknown_where_a_counter_began_anew(before: float | None, after: float | None, taken: float | None) -> None:
    assert taken_j(before, after) == taken


def test_the_energy_of_packages_is_summed_and_that_of_their_parts_is_in_it(tmp_path: Path) -> None:
    for name, micro in (("intel-rapl:0", 3_000_000), ("intel-rapl:1", 2_000_000), ("intel-rapl:0:0", 1_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{micro}\n")
    assert energy_j(tmp_path) == pytest.approx(5.0)
    assert energy_j(tmp_path / "nothing") is None


def test_the_real_counters_count_this_process_among_all() -> None:
    with MachineWatch() as watch:
        sum(number * number for number in range(2_000_000))
    assert watch.seen.wall_s > 0
    assert watch.seen.own_s > 0
    assert watch.seen.host_s >= 0
