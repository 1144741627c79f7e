"""The ways in which a technique offers itself to measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from kinds_of_runs import Case

from powertrain import planner
from powertrain.planner import ask_anew, variants_of
from powertrain.records import Facts, Proposal, to_plain
from powertrain.techniques import CATALOGUE, Technique
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.loader import Loader
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.packing import Packing
from powertrain.techniques.threads import Threads


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda technique: technique.name)
def test_every_way_can_be_pinned_and_is_then_in_the_plan(technique: type[Technique], cases: Mapping[str, Case],
                                                         gpu_facts: Callable[..., Facts]) -> None:
    for case in cases.values():
        for facts in (case.facts, replace(case.facts, hardware=gpu_facts().hardware)):
            recipe = case.recipe.model_copy(update={"techniques": {}})
            for variant in variants_of(technique.name, facts, recipe):
                pin = "off" if variant is None else to_plain(variant)
                plan = planner.make_plan(facts, planner.with_pins(recipe, {technique.name: pin}), 100)
                found = [step.technique for step in plan.steps if step.technique.name == technique.name]
                assert found == ([] if variant is None else [variant])


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda technique: technique.name)
def test_what_is_proposed_can_also_be_left_out(technique: type[Technique], cases: Mapping[str, Case]) -> None:
    for case in cases.values():
        if isinstance(ask_anew(technique.name, case.facts, case.recipe), Proposal):
            assert None in variants_of(technique.name, case.facts, case.recipe)


def test_settings_are_offered_around_what_the_plan_would_take(cases: Mapping[str, Case]) -> None:
    blocks, lora = cases["blocks"], cases["lora"]
    hardware = replace(blocks.facts.hardware, device="cpu", cores=4)
    facts = replace(blocks.facts, hardware=hardware)
    counts = [way.threads for way in variants_of(Threads.name, facts, blocks.recipe) if isinstance(way, Threads)]
    assert set(counts) >= {2, 3, 4}
    sizes = [way.examples for way in variants_of(MicroBatch.name, facts, blocks.recipe) if isinstance(way, MicroBatch)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(1 <= size < 14 for size in sizes)
    kernels = {way.kernel for way in variants_of("attention_kernel", facts, blocks.recipe) if isinstance(way, AttentionKernel)}
    assert kernels == {"bmm", "ragged", "sdpa"}
    tokens = [way.tokens for way in variants_of(Packing.name, lora.facts, lora.recipe) if isinstance(way, Packing)]
    assert max(tokens) == 4 * min(tokens)
    assert [way.workers for way in variants_of(Loader.name, facts, blocks.recipe) if isinstance(way, Loader)] == [1, 2]
