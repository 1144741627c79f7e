"""What a plan expects of a run."""

import dataclasses

import pytest

from powertrain.cost.estimate import estimate, kind_of_work, workload_work
from powertrain.cost.memory import peak_memory
from powertrain.cost.work import training_flops
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.records import Hardware, Reached, UnknownFact

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
    assert "study: " in expected.basis


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


RAGGED = dataclasses.replace(WORKLOAD, block=100, lengths={"min": 10, "p10": 20, "p50": 90, "p90": 200, "max": 256})


def test_padding_is_computed_and_not_counted_as_work_that_was_needed():
    padded = workload_work(MODEL, RAGGED)
    assert padded.tokens == 64 * 100
    assert RAGGED.padding_share > 0.4
    assert padded.padding_flops / (padded.flops + padded.padding_flops) == pytest.approx(RAGGED.padding_share, abs=0.05)
    assert padded.hardware_flops == padded.flops + padded.padding_flops
    expected = estimate(MODEL, RAGGED, MACHINE, 100)
    assert (expected.tokens_per_step, expected.flops_per_step) == (6400, padded.flops)
    assert expected.padding_share == RAGGED.padding_share


def test_sorting_by_length_saves_padding_and_packing_nearly_all_of_it():
    grouped = dataclasses.replace(RAGGED, grouped=True)
    packed = dataclasses.replace(RAGGED, packed_tokens=1024, micro_batch=10)
    filled = dataclasses.replace(packed, fill_multiple=256)
    shares = [workload.padding_share for workload in (RAGGED, grouped, filled, packed)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0 < shares[-2] == pytest.approx(7 * 127.5 / (6400 + 7 * 127.5))
    flops = [workload_work(MODEL, workload).hardware_flops for workload in (RAGGED, grouped, filled, packed)]
    assert flops == sorted(flops, reverse=True)
    assert workload_work(MODEL, packed).padding_flops == pytest.approx(0, abs=1e-3 * flops[-1])


def test_the_fullest_pass_is_padded_to_the_longest_example_or_filled_up():
    assert RAGGED.fullest_pass_tokens == 16 * 256
    packed = dataclasses.replace(RAGGED, packed_tokens=1000, fill_multiple=256)
    assert packed.fullest_pass_tokens == 1024
    assert dataclasses.replace(packed, packed_tokens=64).fullest_pass_tokens == 256      # a longer example has its own pass
    assert WORKLOAD.fullest_pass_tokens == WORKLOAD.micro_batch * WORKLOAD.block


def test_rows_of_padding_never_reach_the_head_of_a_chunked_loss():
    whole, chunked = (workload_work(MODEL, dataclasses.replace(RAGGED, loss_chunk_rows=rows)) for rows in (None, 128))
    assert chunked.flops == pytest.approx(whole.flops)
    head = 6 * MODEL.head_parameters * RAGGED.tokens * RAGGED.padding_share / (1 - RAGGED.padding_share)
    assert whole.padding_flops - chunked.padding_flops == pytest.approx(head, rel=0.02)


def test_runs_of_the_same_kind_of_work_that_finished_here_decide_what_is_expected():
    kind = kind_of_work(MODEL, WORKLOAD)
    assert kind == "native, full, fp32, width 256+, 4096+ tokens a pass, blocks, plain attention"
    known = dataclasses.replace(MACHINE, speeds={kind: Reached(0.5, 0.55, 0.6, runs=4)})
    plain, told = estimate(MODEL, WORKLOAD, MACHINE, 1), estimate(MODEL, WORKLOAD, known, 1)
    assert "4 runs on this machine" in told.basis
    assert told.step_s[1] / told.step_s[0] < plain.step_s[1] / plain.step_s[0]
    other = dataclasses.replace(WORKLOAD, compiled=True)
    assert "runs on this machine" not in estimate(MODEL, other, known, 1).basis


def test_a_model_of_another_library_is_expected_to_take_longer_and_its_memory_is_that_of_our_decoder():
    bridged = dataclasses.replace(MODEL, provider="transformers")
    ours, theirs = estimate(MODEL, WORKLOAD, MACHINE, 1), estimate(bridged, WORKLOAD, MACHINE, 1)
    assert theirs.flops_per_step == ours.flops_per_step
    assert theirs.step_s[1] == pytest.approx(2 * ours.step_s[1], rel=0.01)
    assert "as our decoder of the same shape would take" in theirs.basis
    assert "transformers may take twice as long" in theirs.basis


@pytest.mark.parametrize("adapters", [None, AdapterConfig(r=8)], ids=["full", "lora"])
def test_weights_that_another_library_names_otherwise_count_as_ours(adapters):
    config = make_config("llama", vocabulary=65, layers=6, width=384, context=256)[0]
    ours = model_facts(config, method="lora" if adapters else "full", adapters=adapters)
    theirs = dataclasses.replace(ours, provider="transformers", shapes={"model.layers.5.mlp.up_proj.weight": (1024, 384)})
    assert workload_work(theirs, WORKLOAD).flops == pytest.approx(workload_work(ours, WORKLOAD).flops, rel=0.03)
    found, expected = (sum(peak_memory(model, WORKLOAD).values()) for model in (theirs, ours))
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("change", [{"task": "seq2seq"}, {"heads": 0}, {"mlp_width": 0}])
def test_what_is_not_known_of_another_librarys_model_is_not_guessed(change):
    bridged = dataclasses.replace(MODEL, provider="transformers", **change)
    with pytest.raises(UnknownFact):
        estimate(bridged, WORKLOAD, MACHINE, 1)


def test_the_largest_pass_that_fits_is_named_with_what_it_takes():
    found = estimate(MODEL, WORKLOAD, MACHINE, 1).largest_pass
    assert found["examples"] == 64
    assert found["bytes"] <= MACHINE.free_memory_bytes
    small = dataclasses.replace(MACHINE, free_memory_bytes=400 << 20)
    found = estimate(MODEL, WORKLOAD, small, 1).largest_pass
    assert 1 <= found["examples"] < 64
    assert found["tokens"] == 256 * found["examples"]
    assert found["bytes"] <= 400 << 20
