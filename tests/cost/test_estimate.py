"""What a plan expects of a run."""

import dataclasses

import pytest

from powertrain.cost.estimate import estimate, workload_work
from powertrain.cost.work import training_flops
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.config import make_config
from powertrain.records import Hardware, UnknownFact

MACHINE = Hardware(name="a CPU", device="cpu", cores=2, memory_bytes=2**34, free_memory_bytes=2**34,
                   peak_flops_per_s={"fp32": 2e11, "bf16": 1e12}, bandwidth_bytes_per_s=3e10)
MODEL = model_facts(make_config("gpt2", vocabulary=65, layers=6, width=384, context=256)[0])
WORKLOAD = Workload(examples=64, block=256, micro_batch=16)


def test_an_estimate_holds_the_numbers_of_its_parts():
    expected = estimate(MODEL, WORKLOAD, MACHINE, 100)
    low_s, high_s = expected.step_s
    assert expected.flops_per_step == training_flops(MODEL, [256] * 64)
    assert expected.flops_per_token == pytest.approx(expected.flops_per_step / (64 * 256))
    assert (expected.tokens_per_step, expected.steps, expected.dtype) == (64 * 256, 100, "fp32")
    assert expected.peak_flops_per_s == 2e11
    assert 0 < expected.floor_s <= low_s <= high_s
    assert expected.total_memory_bytes > 16 * MODEL.parameters
    assert "guess" in expected.basis


def test_an_unmeasured_machine_gives_no_estimate():
    with pytest.raises(UnknownFact):
        estimate(MODEL, WORKLOAD, dataclasses.replace(MACHINE, peak_flops_per_s={}), 100)


def test_a_last_micro_batch_that_is_smaller_is_counted_as_it_is():
    uneven = workload_work(MODEL, dataclasses.replace(WORKLOAD, examples=10, micro_batch=4))
    assert uneven.tokens == 10 * 256
    assert uneven.flops == training_flops(MODEL, [256] * 10)


def test_checkpointing_adds_work_and_compiling_takes_operators_away():
    plain, again, compiled = (workload_work(MODEL, dataclasses.replace(WORKLOAD, **change))
                              for change in ({}, {"checkpoint_every": 2}, {"compiled": True}))
    assert again.flops == plain.flops == compiled.flops
    assert again.recompute_flops > plain.recompute_flops == 0
    assert compiled.operators < plain.operators
    assert compiled.elementwise_bytes < plain.elementwise_bytes
