"""Packing: the arrangement's properties, what the technique makes of a step, and who decides what goes into a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from powertrain.cost.workload import lengths_at, longest_of, mean_length, padding_share
from powertrain.data.example import collate_padded, real_documents
from powertrain.data.order import pack
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, NotApplied, Proposal, Refusal, WrongUse
from powertrain.records.plan import Why
from powertrain.techniques.length_grouping import LengthGrouping
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.packing import Packing

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)
EVEN = {"min": 10, "p10": 100, "p50": 500, "p90": 900, "max": 1000}      # about evenly spread over 10 to 1000


def pinned(**techniques: object) -> Recipe:
    return Recipe.model_validate({"techniques": techniques})


@given(lengths=LENGTHS, budget=st.integers(1, 700), crossover=st.integers(1, 10_000))
@example(lengths=[100, *[10] * 20], budget=160, crossover=1)             # by cost alone, all the short ones go together
def test_every_document_is_in_one_pass_whole_and_within_the_budget(lengths: list[int], budget: int, crossover: int) -> None:
    passes = pack(lengths, budget, crossover=crossover)
    assert sorted(document for documents in passes for document in documents) == list(range(len(lengths)))
    for documents in passes:
        assert sum(lengths[d] for d in documents) <= budget or len(documents) == 1


@given(lengths=LENGTHS, budget=st.integers(1, 700))
def test_packing_is_a_function_of_the_lengths(lengths: list[int], budget: int) -> None:
    assert pack(lengths, budget, crossover=100) == pack(list(lengths), budget, crossover=100)


@given(lengths=LENGTHS, budget=st.integers(300, 900))
def test_there_are_never_many_more_passes_than_the_tokens_need(lengths: list[int], budget: int) -> None:
    needed = -(-sum(lengths) // budget)
    assert len(pack(lengths, budget, crossover=100)) <= 2 * needed       # any fit: two passes never fit in one


def test_passes_are_balanced_in_tokens_where_attention_is_cheap() -> None:
    lengths = [90, 80, 70, 60, 50, 40, 30, 20, 10, 5]
    tokens = [sum(lengths[d] for d in documents) for documents in pack(lengths, 240, crossover=10**9)]
    assert len(tokens) == 2
    assert max(tokens) - min(tokens) <= 10                               # first come, first served: 240 and 215


def test_passes_are_balanced_in_attention_where_that_is_dear() -> None:
    lengths = [100, *[10] * 20]
    passes = pack(lengths, 250, crossover=1.0)
    assert sorted(len(documents) for documents in passes) == [1, 20]     # 10,000 against 20 x 100, not 15 short ones more
    assert lengths[passes[0][0]] == 100                                  # the dearest pass comes first


def test_a_document_longer_than_the_budget_is_a_pass_of_its_own() -> None:
    assert pack([5, 50, 6], 20, crossover=100) == [[1], [0, 2]]
    rest = [90, 80, 70, 60, 50, 40, 30, 20, 10, 5]
    passes = pack([500, *rest], 240, crossover=10**9)
    assert passes[1:] == [[document + 1 for document in documents] for documents in pack(rest, 240, crossover=10**9)]


def test_documents_of_a_pass_lie_shortest_first() -> None:
    lengths = [7, 3, 9, 3]
    assert [[lengths[d] for d in documents] for documents in pack(lengths, 100, crossover=100)] == [[3, 3, 7, 9]]


@pytest.mark.parametrize(("budget", "crossover"), [(0, 1), (1, 0)])
def test_a_budget_of_nothing_is_refused(budget: int, crossover: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        pack([1], budget, crossover=crossover)


# ------------------------------------------------------------------------------------------------ padding, estimated


def test_quantiles_give_the_lengths_between_them() -> None:
    assert lengths_at(EVEN, [0, 0.3, 1]) == pytest.approx([10, 300, 1000])
    assert mean_length(EVEN) == pytest.approx(500, rel=0.01)


def test_the_padding_of_a_batch_grows_with_its_examples_and_sorting_takes_most_of_it_away() -> None:
    # the longest of n even draws is about n / (n + 1) of the range
    assert longest_of(EVEN, 3) == pytest.approx(750, rel=0.02)
    assert padding_share(EVEN, 1) == pytest.approx(0, abs=0.01)
    assert padding_share(EVEN, 15) == pytest.approx(1 - 500 / 937, abs=0.02)
    assert padding_share(EVEN, 4, grouped_from=32) < padding_share(EVEN, 4) / 3
    assert padding_share({"min": 9, "p10": 9, "p50": 9, "p90": 9, "max": 9}, 16) == 0


# ------------------------------------------------------------------------------------------------ the technique


def test_a_packed_step_has_the_padded_steps_examples_and_no_padding(cases: Mapping[str, Any]) -> None:
    plain = cases["lora"].make_setup()
    packed = Packing(tokens=100).apply(plain)
    Packing(tokens=100).confirm(packed)
    padded, passes = plain.prepare(0), packed.prepare(0)
    assert padded[0].padding_tokens > 0
    assert sum(batch.padding_tokens for batch in passes) == 0
    assert sum(batch.real_tokens for batch in passes) == padded[0].real_tokens
    assert sum(batch.trained_tokens for batch in passes) == padded[0].trained_tokens
    assert len(passes) == -(-padded[0].real_tokens // 100)
    assert max(sum(batch.lengths) for batch in passes) <= 100


def test_padding_that_comes_back_is_noticed(cases: Mapping[str, Any]) -> None:
    packed = Packing(tokens=100).apply(cases["lora"].make_setup())
    with pytest.raises(NotApplied, match="slots of a pass are padding"):
        Packing(tokens=100).confirm(replace(packed, collate=collate_padded))
    with pytest.raises(NotApplied, match="not 60 at most"):
        Packing(tokens=60).confirm(replace(packed, collate=Packing(tokens=60).collate))


def test_passes_are_filled_up_so_that_sizes_repeat_and_learn_the_same(cases: Mapping[str, Any]) -> None:
    packed = Packing(tokens=100).apply(cases["lora"].make_setup())
    filled = Packing(tokens=100, multiple=25).apply(cases["lora"].make_setup())
    Packing(tokens=100, multiple=25).confirm(filled)
    passes, plain = filled.prepare(0), packed.prepare(0)
    assert {len(batch.tokens) % 25 for batch in passes} == {0}
    assert [batch.real_tokens for batch in passes] == [batch.real_tokens for batch in plain]
    assert [batch.trained_tokens for batch in passes] == [batch.trained_tokens for batch in plain]
    for ours, theirs in zip(passes, plain, strict=True):
        torch.testing.assert_close(filled.batch_loss(ours), packed.batch_loss(theirs), rtol=1e-5, atol=0)
    with pytest.raises(NotApplied, match="slots of a pass are padding"):
        Packing(tokens=100, multiple=2).confirm(replace(filled, arrange=Packing(tokens=100, multiple=2).arrange))


def test_no_document_of_padding_is_longer_than_a_real_one(cases: Mapping[str, Any]) -> None:
    """Learned positions end somewhere, and padding must not reach beyond."""
    for batch in Packing(tokens=400, multiple=400).apply(cases["lora"].make_setup()).prepare(0):
        real = real_documents(batch)
        assert max(batch.lengths) == max(batch.lengths[:real])
        assert sum(batch.lengths[real:]) == batch.padding_tokens > 40
        assert sum(batch.lengths) == len(batch.tokens) == 400


def test_packing_says_how_much_padding_there_would_be(lora_facts: Facts) -> None:
    answer = ask_anew(Packing.name, lora_facts, Recipe())
    assert isinstance(answer, Proposal)
    share = padding_share(lora_facts.data.length_quantiles, 14)
    assert f"{share:.0%} padding" in answer.because
    assert answer.claim.step_time[0] == pytest.approx(1 - share)


@pytest.mark.parametrize("train_batch_size", [1, 4, 32, 200])
def test_little_of_a_step_is_filling_however_few_tokens_it_has(lora_facts: Facts, train_batch_size: int) -> None:
    data = replace(lora_facts.data, train_batch_size=train_batch_size)
    answer = ask_anew(Packing.name, replace(lora_facts, data=data), Recipe())
    assert isinstance(answer, Proposal)
    assert isinstance(packing := answer.technique, Packing)
    assert 16 <= packing.multiple <= max(16, 0.1 * min(packing.tokens, data.train_batch_size * data.block))


def test_packing_fits_its_passes_into_the_memory(lora_facts: Facts) -> None:
    def tokens(free_bytes: int, facts: Facts = lora_facts) -> int:
        machine = replace(facts.hardware, free_memory_bytes=free_bytes)
        answer = ask_anew(Packing.name, replace(facts, hardware=machine), Recipe())
        assert isinstance(answer, Proposal)
        return answer.technique.tokens  # type: ignore[attr-defined]

    assert tokens(1 << 33) == 4096
    assert 64 <= tokens(4 << 20) < 4096
    assert tokens(1) == 64
    long = replace(lora_facts, data=replace(lora_facts.data, block=700, max_length=1500))
    assert tokens(1, long) == 1500           # the longest example is a pass in any case


def test_examples_of_one_length_and_other_libraries_models_are_not_packed(facts: Facts, lora_facts: Facts) -> None:
    equal = ask_anew(Packing.name, facts, Recipe())
    bridged = ask_anew(Packing.name, replace(lora_facts, model=replace(lora_facts.model, provider="transformers")), Recipe())
    assert isinstance(equal, Refusal)
    assert isinstance(bridged, Refusal)
    assert (equal.possible, bridged.possible) == (None, None)
    assert "transformers" in bridged.because


def test_one_technique_decides_what_goes_into_a_pass(lora_facts: Facts) -> None:
    def deciding(recipe: Recipe) -> list[str]:
        names = [step.technique.name for step in make_plan(lora_facts, recipe, 100).steps]
        return [name for name in names if name in ("packing", "micro_batch", "length_grouping")]

    assert deciding(Recipe()) == ["packing"]
    many = replace(lora_facts, data=replace(lora_facts.data, train_batch_size=64, block=256, max_length=512))
    refused = {refusal.technique: refusal for refusal in make_plan(many, Recipe(), 100).refused}
    assert (refused["micro_batch"].why, refused["micro_batch"].rival) == (Why.NOT_NEEDED, "packing")
    assert deciding(pinned(micro_batch={"examples": 4})) == ["micro_batch", "length_grouping"]
    assert deciding(pinned(packing="off", micro_batch={"examples": 4})) == ["micro_batch", "length_grouping"]
    assert deciding(pinned(packing="off")) == []                         # 14 short examples go in one pass
    with pytest.raises(WrongUse, match="both pinned on"):
        make_plan(lora_facts, pinned(packing="on", micro_batch="on"), 100)


def test_padded_passes_fit_the_memory_by_their_longest_example(lora_facts: Facts) -> None:
    def examples(longest: int) -> int:
        data = replace(lora_facts.data, max_length=longest, train_batch_size=64, length_quantiles=EVEN)
        asked = replace(lora_facts, data=data, hardware=replace(lora_facts.hardware, free_memory_bytes=64 << 20))
        answer = ask_anew(MicroBatch.name, asked, pinned(packing="off"))
        assert isinstance(answer, Proposal)
        return answer.technique.examples  # type: ignore[attr-defined]

    assert examples(4000) < examples(1000)


def test_sorting_says_what_it_saves_and_keeps_the_step(cases: Mapping[str, Any]) -> None:
    case = cases["padded"]
    answer = ask_anew(LengthGrouping.name, case.facts, case.recipe)
    assert isinstance(answer, Proposal)
    before, after = (padding_share(case.facts.data.length_quantiles, 4, grouped_from=n) for n in (None, 14))
    assert answer.numbers == {"padding_share": before, "sorted_padding_share": after}
    assert f"from {before:.0%} to {after:.0%}" in answer.because
    plain = case.make_setup()
    grouped = answer.technique.apply(plain)
    assert sum(b.padding_tokens for b in grouped.prepare(0)) < sum(b.padding_tokens for b in plain.prepare(0)) / 2
    assert [len(b.lengths) for b in grouped.prepare(0)] == [4, 4, 4, 2]
    assert sum(b.real_tokens for b in grouped.prepare(0)) == sum(b.real_tokens for b in plain.prepare(0))


def test_sorting_is_refused_where_it_would_change_nothing(facts: Facts, lora_facts: Facts) -> None:
    reasons = [ask_anew(LengthGrouping.name, facts, Recipe()), ask_anew(LengthGrouping.name, lora_facts, Recipe()),
               ask_anew(LengthGrouping.name, lora_facts, pinned(packing="off"))]
    assert all(isinstance(reason, Refusal) for reason in reasons)
    assert [reason.why for reason in reasons] == [Why.DOES_NOT_APPLY, Why.NOT_NEEDED, Why.NOT_NEEDED]  # type: ignore[union-attr]
