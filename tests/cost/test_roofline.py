"""The floor of a step and the interval above it."""

import dataclasses

import pytest

from powertrain.cost.roofline import BANDWIDTH, COMPUTE, efficiency, expected_step_s, step_floor
from powertrain.cost.work import Work
from powertrain.records import Hardware, UnknownFact

MACHINE = Hardware(name="a CPU", device="cpu", cores=2, memory_bytes=2**34, free_memory_bytes=2**34,
                   peak_flops_per_s={"fp32": 1e11}, bandwidth_bytes_per_s=1e10)
WORK = Work(dtype="fp32", tokens=4096, flops=3e11, recompute_flops=0.0, gemm_bytes=4e9, elementwise_bytes=5e9,
            optimizer_bytes=1e9, operators=1000, dropout_elements=0.0)
LARGE = {"micro_batch_tokens": 4096, "width": 512}


def test_the_slower_of_compute_and_memory_is_the_floor():
    assert step_floor(WORK, MACHINE) == (3.0, COMPUTE)
    assert step_floor(dataclasses.replace(WORK, gemm_bytes=49e9), MACHINE) == (5.0, BANDWIDTH)


def test_recomputation_is_not_in_the_floor_but_in_the_expectation():
    more = dataclasses.replace(WORK, recompute_flops=1e11)
    assert step_floor(more, MACHINE) == step_floor(WORK, MACHINE)
    assert expected_step_s(more, MACHINE, **LARGE) > expected_step_s(WORK, MACHINE, **LARGE)


def test_an_unknown_peak_is_an_error_and_not_a_guess():
    with pytest.raises(UnknownFact, match="bf16"):
        step_floor(dataclasses.replace(WORK, dtype="bf16"), MACHINE)


def test_an_unknown_bandwidth_is_an_error_and_not_a_guess():
    unknown = dataclasses.replace(MACHINE, bandwidth_bytes_per_s=None)
    with pytest.raises(UnknownFact, match="bandwidth"):
        step_floor(WORK, unknown)
    with pytest.raises(UnknownFact, match="bandwidth"):
        expected_step_s(WORK, unknown, **LARGE)


@pytest.mark.parametrize("work", [
    WORK, dataclasses.replace(WORK, gemm_bytes=1e12), dataclasses.replace(WORK, flops=1.0, operators=10**6),
])
def test_the_expectation_is_an_interval_that_starts_at_the_floor_or_above(work):
    low_s, high_s = expected_step_s(work, MACHINE, **LARGE)
    assert step_floor(work, MACHINE)[0] <= low_s <= high_s


def test_small_products_reach_a_smaller_share_of_the_peak():
    large = expected_step_s(WORK, MACHINE, **LARGE)
    assert expected_step_s(WORK, MACHINE, micro_batch_tokens=512, width=512) > large
    assert expected_step_s(WORK, MACHINE, micro_batch_tokens=4096, width=128) > large


def test_operator_calls_add_up_on_a_cpu_and_hide_behind_the_work_on_a_gpu():
    gpu = dataclasses.replace(MACHINE, device="cuda")
    busy = dataclasses.replace(WORK, operators=100_000)
    idle = dataclasses.replace(WORK, operators=0)
    assert expected_step_s(busy, MACHINE, **LARGE)[0] == pytest.approx(
        expected_step_s(idle, MACHINE, **LARGE)[0] + 1.0)
    assert expected_step_s(busy, gpu, **LARGE) == expected_step_s(idle, gpu, **LARGE)
    launch_bound = dataclasses.replace(WORK, flops=1.0, gemm_bytes=0, optimizer_bytes=0, operators=10**6)
    assert expected_step_s(launch_bound, gpu, **LARGE)[0] == pytest.approx(4.0)


def test_dropout_costs_time_on_a_cpu():
    dropping = dataclasses.replace(WORK, dropout_elements=1e9)
    assert expected_step_s(dropping, MACHINE, **LARGE)[0] > expected_step_s(WORK, MACHINE, **LARGE)[0]


def test_each_efficiency_names_its_basis():
    for device in ("cpu", "cuda", "mps"):
        basis = efficiency(dataclasses.replace(MACHINE, device=device)).basis
        assert basis.startswith(("guess: ", "study: ", "formula: "))
