"""The collectives of a step as formulas: held against torch in groups of 8, 64 and 512 processes, which need no devices."""

import dataclasses

import pytest
import torch
from fake_group import counted_tensor_parts

from powertrain.cost.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collectives,
    Division,
    collectives_of,
    exchanged_s,
)
from powertrain.cost.estimate import estimate
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.records import Hardware, PeerLink, UnknownFact
from powertrain.run.rehearsal import TOKENS, Shape, counted_step

SMALL = {"vocabulary": 1001, "context": 64, "layers": 4, "width": 96, "heads": 4}
WIDE = make_config("llama", **{**SMALL, "vocabulary": 32001, "layers": 3, "width": 768, "kv_heads": 2})[0]
CPU = Hardware("test CPU", "cpu", cores=2, memory_bytes=8 << 30, free_memory_bytes=6 << 30, processes=4,
               peak_flops_per_s={"fp32": 1e11}, bandwidth_bytes_per_s=1e10)
GPU = dataclasses.replace(CPU, device="cuda", devices=4)


def held_against_torch(config, facts, division, passes, **model):
    found = counted_step(Shape(config, **model), division, passes)
    expected = {one.kind: one for one in collectives_of(facts, division, passes)}
    assert found.counts == {kind: one.count for kind, one in expected.items()}
    for kind, one in expected.items():
        assert one.total_bytes == pytest.approx(found.total_bytes[kind], rel=0.03)
    return expected


@pytest.mark.parametrize("division", [
    Division(8), Division(8, 1), Division(8, 2), Division(8, 3), Division(64), Division(64, 1), Division(64, 3),
    Division(64, 3, replicas=8), Division(512), Division(512, 2), Division(512, 3), Division(512, 3, replicas=64)], ids=str)
def test_counts_are_exact_and_bytes_within_3_percent(division):
    expected = held_against_torch(WIDE, model_facts(WIDE), division, passes=2)
    assert set(expected) == ({ALL_GATHER, REDUCE_SCATTER} if division.stage else {ALL_REDUCE}) | (
        {ALL_REDUCE} if division.replicas > 1 else set())


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma", "gpt_neox"])
@pytest.mark.parametrize("division", [Division(8), Division(8, 3), Division(8, 2, replicas=2)], ids=str)
def test_so_they_are_for_biases_tied_heads_and_learned_positions(family, division):
    config = make_config(family, **SMALL)[0]
    held_against_torch(config, model_facts(config), division, passes=1)


@pytest.mark.parametrize(("family", "width", "vocabulary"), [("gpt2", 768, 6000), ("llama", 768, 3000), ("llama", 1024, 2000)])
def test_gradients_fill_buckets_in_the_order_of_the_weights(family, width, vocabulary):
    config = make_config(family, vocabulary=vocabulary, context=64, layers=1, width=width, heads=8)[0]
    held_against_torch(config, model_facts(config), Division(8), passes=1)


@pytest.mark.parametrize("target", ["all-linear", r".*layers\.[13]\..*down_proj", r".*layers\.3\..*(q|v)_proj"])
@pytest.mark.parametrize("division", [Division(8), Division(8, 1), Division(8, 3), Division(8, 2, replicas=2)], ids=str)
def test_so_they_are_for_adapters_on_some_blocks(target, division):
    config, adapters = make_config("llama", **SMALL)[0], AdapterConfig(r=4, dropout=0.0, target_modules=target)
    facts = model_facts(config, method="lora", path="here", adapters=adapters, frozen_dtype="bf16")
    held_against_torch(config, facts, division, passes=2, adapters=adapters, frozen=torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("division", [
    Division(2, tensor=2), Division(4, tensor=4), Division(8, tensor=2), Division(512, tensor=4)], ids=str)
def test_divided_blocks_sum_the_residual_four_times_and_groups_sum_gradients(family, division):
    config = make_config(family, **SMALL)[0]
    facts, passes = model_facts(config), 3
    found = counted_tensor_parts(config, division, passes)
    expected = collectives_of(facts, division, passes, tokens=passes * TOKENS)
    assert found.counts == {ALL_REDUCE: sum(one.count for one in expected)}
    assert sum(one.total_bytes for one in expected) == pytest.approx(found.total_bytes[ALL_REDUCE], rel=1e-6)
    norms = 2 if family == "qwen3" else 0
    assert expected[0].count == passes * SMALL["layers"] * (4 + norms)
    groups = division.processes // division.tensor
    assert [one.processes for one in expected] == [division.tensor, groups][:1 + (groups > 1)]


def test_one_process_exchanges_nothing():
    assert collectives_of(model_facts(WIDE), Division(1), passes=3) == ()


# ------------------------------------------------------------------------------------------------ seconds


def test_the_seconds_are_those_of_a_ring_over_the_measured_link():
    link = PeerLink(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    gathered = Collectives(ALL_GATHER, 3, 8_000_000, "shards", 8)
    assert gathered.seconds(link) == pytest.approx(7 * (3 * 1e-5 + 1e-3))
    assert dataclasses.replace(gathered, kind=ALL_REDUCE).seconds(link) == pytest.approx(2 * gathered.seconds(link))
    found = (gathered, Collectives(ALL_REDUCE, 3, 1_000_000, "replicas", 2))
    slow = PeerLink(1e-3, 1e8)
    (low_s, high_s), basis = exchanged_s(found, dataclasses.replace(GPU, links={"shards": link, "replicas": slow}))
    assert low_s == high_s == pytest.approx(gathered.seconds(link) + 2 * (3e-3 + 5e-3))
    assert "measured links" in basis


def test_the_seconds_over_a_link_that_was_not_measured_are_unknown_or_a_guess_that_says_so():
    found = collectives_of(model_facts(WIDE), Division(4), passes=1)
    with pytest.raises(UnknownFact, match="latency and bandwidth between the processes of this run are not measured"):
        exchanged_s(found, GPU)
    (low_s, high_s), basis = exchanged_s(found, CPU)
    assert 0 < low_s < high_s
    assert basis.startswith("guess: ")


def test_an_estimate_counts_the_exchanges_of_its_processes_and_says_how():
    facts, workload = model_facts(WIDE), Workload(16, 64, micro_batch=4)

    def expected(hardware):
        found = estimate(facts, workload, hardware, 10)
        return found.step_s, found.basis

    (guessed, said), link = expected(CPU), PeerLink(1e-5, 1e8)
    (measured, by_link) = expected(dataclasses.replace(CPU, links={"processes": link}))
    (_, unknown) = expected(GPU)
    assert "guess: to exchange tensors takes as long as 4 to 8 copies" in said
    assert "formulas with the measured links" in by_link
    assert measured[1] - guessed[1] == pytest.approx(
        sum(one.seconds(link) for one in collectives_of(facts, Division(4), 1)) - exchanged_s(
            collectives_of(facts, Division(4), 1), CPU)[0][1])
    assert "the time of exchanges is not in it, because latency and bandwidth between the processes" in unknown
