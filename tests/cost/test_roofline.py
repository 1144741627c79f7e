"""The floor of a step and the interval above it."""

import dataclasses
import json

import pytest

from powertrain.cost.estimate import (
    BANDWIDTH,
    COMPUTE,
    TABLE,
    Efficiency,
    efficiency,
    expected_step_s,
    ideal_step_s,
    size_class,
    step_floor,
)
from powertrain.cost.work import Work
from powertrain.records import Hardware, Reached, UnknownFact

MACHINE = Hardware(name="a CPU", device="cpu", cores=2, memory_bytes=2**34, free_memory_bytes=2**34,
                   peak_flops_per_s={"fp32": 1e11}, bandwidth_bytes_per_s=1e10)
WORK = Work(dtype="fp32", tokens=4096, flops=3e11, recompute_flops=0.0, gemm_bytes=4e9, elementwise_bytes=5e9,
            optimizer_bytes=1e9, operators=1000, dropout_elements=0.0)
HALF = Efficiency(low=0.25, high=0.5, basis="test")


def test_the_slower_of_compute_and_memory_is_the_floor():
    assert step_floor(WORK, MACHINE) == (3.0, COMPUTE)
    assert step_floor(dataclasses.replace(WORK, gemm_bytes=49e9), MACHINE) == (5.0, BANDWIDTH)


@pytest.mark.parametrize("what", ["recompute_flops", "padding_flops"])
def test_recomputation_and_padding_are_not_in_the_floor_but_in_the_expectation(what):
    more = dataclasses.replace(WORK, **{what: 1e11})
    assert step_floor(more, MACHINE) == step_floor(WORK, MACHINE)
    assert ideal_step_s(more, MACHINE) == pytest.approx(ideal_step_s(WORK, MACHINE) + 1.0)
    assert expected_step_s(more, MACHINE, HALF) > expected_step_s(WORK, MACHINE, HALF)


def test_the_ideal_step_is_the_sum_of_its_parts_at_the_measured_peaks():
    dropping = dataclasses.replace(WORK, dropout_elements=1e8)
    products, optimizer, between, calls, dropout = 3.0, 0.1, 0.25, 0.01, 0.5
    assert ideal_step_s(dropping, MACHINE) == pytest.approx(products + optimizer + between + calls + dropout)


def test_an_unknown_peak_is_an_error_and_not_a_guess():
    with pytest.raises(UnknownFact, match="bf16"):
        step_floor(dataclasses.replace(WORK, dtype="bf16"), MACHINE)


def test_an_unknown_bandwidth_is_an_error_and_not_a_guess():
    unknown = dataclasses.replace(MACHINE, bandwidth_bytes_per_s=None)
    with pytest.raises(UnknownFact, match="bandwidth"):
        step_floor(WORK, unknown)
    with pytest.raises(UnknownFact, match="bandwidth"):
        ideal_step_s(WORK, unknown)


@pytest.mark.parametrize("work", [
    WORK, dataclasses.replace(WORK, gemm_bytes=1e12), dataclasses.replace(WORK, flops=1.0, operators=10**6),
])
def test_the_expectation_is_an_interval_that_starts_at_the_floor_or_above(work):
    for expect in (HALF, Efficiency(1.5, 3.0, "faster than its parts")):
        low_s, high_s = expected_step_s(work, MACHINE, expect)
        assert step_floor(work, MACHINE)[0] <= low_s <= high_s
    assert expected_step_s(work, MACHINE, HALF) == (2 * ideal_step_s(work, MACHINE), 4 * ideal_step_s(work, MACHINE))


def test_small_products_and_large_ones_reach_shares_of_their_own():
    assert size_class(4096, 512) == "large"
    assert size_class(512, 512) == size_class(4096, 128) == "small"
    for device in ("cpu", "cuda"):
        machine = dataclasses.replace(MACHINE, device=device)
        small, large = efficiency(machine, "fp32", "small"), efficiency(machine, "fp32", "large")
        assert 0 < small.low < small.high <= 1 >= large.high > large.low > 0
        assert small.high < large.high


def test_operator_calls_add_up_on_a_cpu_and_hide_behind_the_work_on_a_gpu():
    gpu = dataclasses.replace(MACHINE, device="cuda")
    busy = dataclasses.replace(WORK, operators=100_000)
    idle = dataclasses.replace(WORK, operators=0)
    assert ideal_step_s(busy, MACHINE) == pytest.approx(ideal_step_s(idle, MACHINE) + 1.0)
    assert ideal_step_s(busy, gpu) == ideal_step_s(idle, gpu)
    launch_bound = dataclasses.replace(WORK, flops=1.0, gemm_bytes=0, optimizer_bytes=0, operators=10**6)
    assert ideal_step_s(launch_bound, gpu) == pytest.approx(5.0)


def test_each_efficiency_names_its_basis():
    for row in json.loads(TABLE.read_text())["rows"]:
        assert row["basis"].startswith(("guess: ", "study: "))
        assert 0 < row["low"] < row["high"]
    for device in ("cpu", "cuda", "mps"):
        for dtype in ("fp32", "bf16", "fp16", "tf32"):
            for size in ("small", "large"):
                found = efficiency(dataclasses.replace(MACHINE, device=device), dtype, size)
                assert found.basis.startswith(("guess: ", "study: "))


def test_runs_on_this_very_machine_go_before_the_table():
    machine = dataclasses.replace(MACHINE, speeds={"a kind": Reached(low=0.4, median=0.6, high=0.8, runs=3)})
    assert efficiency(machine, "fp32", "large", "a kind") == Efficiency(0.4, 0.8, "3 runs on this machine")
    assert efficiency(machine, "fp32", "large", "another kind") == efficiency(MACHINE, "fp32", "large")


def test_an_interval_of_runs_that_agree_is_never_narrower_than_a_tenth_to_either_side():
    machine = dataclasses.replace(MACHINE, speeds={"a kind": Reached(low=0.49, median=0.5, high=0.51, runs=1)})
    found = efficiency(machine, "fp32", "large", "a kind")
    assert (found.low, found.high) == pytest.approx((0.45, 0.55))
    assert found.basis == "1 run on this machine"
