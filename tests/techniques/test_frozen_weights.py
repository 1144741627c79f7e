"""Weights that are not trained: no gradient, no fp32 copy, and in 4 bits only where the user says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from kinds_of_runs import LORA, make_ragged

from powertrain.models.kernels.frozen import FrozenLinear
from powertrain.planner import ask_anew, make_plan, workload_of
from powertrain.recipe import Recipe
from powertrain.records import Effect, Facts, Hardware, NotApplied, Plan, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.four_bit_base import FourBitBase
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.frozen_base import FrozenBase
from powertrain.training.loop import apply_plan

UPPER = replace(LORA, target_modules=r".*layers\.1\..*")     # the upper of two blocks
RECIPE = Recipe()


def plan_of(*techniques: Any) -> Plan:
    return Plan(tuple(Proposal(technique, "test", Effect((1.0, 1.0), 0, "guess: test")) for technique in techniques), ())


# ------------------------------------------------------------------------------------------------ no gradient


def test_only_what_is_trained_has_a_gradient_and_nothing_below_it_is_recorded() -> None:
    setup = FrozenBackward(first=1).apply(make_ragged(UPPER))
    FrozenBackward(first=1).confirm(setup)
    recorded: list[bool] = []
    # as gradient checkpointing elsewhere does, which by itself makes a backward pass through all blocks
    setup.model.get_submodule("embedding").register_forward_hook(lambda *given: given[2].detach().requires_grad_())
    for block in setup.model.get_submodule("blocks").children():
        block.register_forward_hook(lambda module, inputs, output: recorded.append(output.requires_grad))
    setup.batch_loss(setup.prepare(0)[0]).backward()  # type: ignore[no-untyped-call]
    assert recorded == [False, True]
    for name, parameter in setup.model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad == (".adapters." in name)


def test_a_gradient_that_would_be_cut_off_is_noticed() -> None:
    with pytest.raises(NotApplied, match=r"weights have a gradient and are not trained, or the reverse, such as blocks\.0"):
        FrozenBackward(first=1).confirm(FrozenBackward(first=1).apply(make_ragged(LORA)))


def test_a_block_that_is_recorded_for_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = FrozenBackward(first=1).apply(make_ragged(UPPER))
    monkeypatch.setattr(torch, "no_grad", torch.enable_grad)
    setup.model.get_submodule("embedding").register_forward_hook(lambda *given: given[2].detach().requires_grad_())
    with pytest.raises(NotApplied, match="block 0 is recorded, which lies below block 1"):
        FrozenBackward(first=1).confirm(setup)


def test_confirming_leaves_no_gradient_behind() -> None:
    setup = FrozenBackward().apply(make_ragged(LORA))
    FrozenBackward().confirm(setup)
    assert all(parameter.grad is None for parameter in setup.model.parameters())


def test_the_lowest_adapted_block_is_where_the_backward_pass_ends(lora_facts: Facts, facts: Facts) -> None:
    upper = replace(lora_facts, model=replace(lora_facts.model, adapted_layers=(1,)))
    answer = ask_anew(FrozenBackward.name, upper, RECIPE)
    assert isinstance(answer, Proposal)
    assert answer.technique == FrozenBackward(1)
    assert isinstance(ask_anew(FrozenBackward.name, facts, RECIPE), Refusal)


# ------------------------------------------------------------------------------------------------ no fp32 copy


def test_frozen_matrices_are_kept_in_the_products_type_and_give_the_same_numbers(cases: Mapping[str, Any]) -> None:
    case = cases["lora in bf16"]
    plain, changed = case.make_setup(), apply_plan(case.make_setup(), plan_of(FrozenBase("bf16")))
    batch = plain.prepare(0)[0]
    assert torch.equal(plain.batch_loss(batch), changed.batch_loss(batch))
    frozen = [m for m in changed.model.get_submodule("blocks").modules() if isinstance(m, FrozenLinear)]
    assert {m.weight.dtype for m in frozen} == {torch.bfloat16}
    assert {p.dtype for p in changed.model.parameters() if p.requires_grad} == {torch.float32}


def test_frozen_weights_that_were_stored_in_bf16_are_widened_once_for_fp32_products(lora_facts: Facts) -> None:
    stored = replace(lora_facts, model=replace(lora_facts.model, frozen_dtype="bf16"))
    answer = ask_anew(FrozenBase.name, replace(stored, hardware=replace(stored.hardware, instructions=())), RECIPE)
    assert isinstance(answer, Proposal)
    assert answer.technique == FrozenBase("fp32")
    assert answer.claim.peak_memory_bytes == 2 * stored.model.matmul_parameters
    little = replace(stored, hardware=replace(stored.hardware, instructions=(), free_memory_bytes=1000))
    assert isinstance(ask_anew(FrozenBase.name, little, RECIPE), Refusal)


def test_frozen_base_says_no_where_there_is_nothing_to_convert(facts: Facts, lora_facts: Facts) -> None:
    fp32 = replace(lora_facts.hardware, device="cpu", instructions=())
    four_bit = replace(lora_facts, model=replace(lora_facts.model, frozen_dtype="nf4"))
    for asked, why in ((facts, Why.DOES_NOT_APPLY), (four_bit, Why.DOES_NOT_APPLY),
                       (replace(lora_facts, hardware=fp32), Why.NOT_NEEDED)):
        answer = ask_anew(FrozenBase.name, asked, RECIPE)
        assert isinstance(answer, Refusal)
        assert answer.why is why


def test_bf16_asks_only_what_is_trained_to_be_fp32() -> None:
    setup = apply_plan(make_ragged(LORA), plan_of(Bf16(), FrozenBase("bf16")))
    Bf16().confirm(setup)
    next(p for p in setup.model.parameters() if p.requires_grad).data = torch.zeros(4, 64, dtype=torch.bfloat16)
    with pytest.raises(NotApplied, match=r"trained are torch\.bfloat16, torch\.float32, not all fp32"):
        Bf16().confirm(setup)


@pytest.mark.parametrize("pins", [{}, {"bf16": "off"}, {"bf16": "off", "tf32": "off"}, {"tf32": "on"}, {"fp16": "on"}],
                         ids=str)
@pytest.mark.parametrize("machine", [
    {"device": "cpu", "instructions": ("avx512_bf16",)}, {"device": "cpu"},
    {"device": "cpu", "instructions": ("amx_bf16",), "peak_flops_per_s": {"fp32": 1e11, "bf16": 1.1e11}},
    {"device": "cuda", "compute_capability": (9, 0)}, {"device": "cuda", "compute_capability": (7, 5)},
    {"device": "cuda", "compute_capability": (8, 6), "peak_flops_per_s": {"fp32": 3.5e13, "bf16": 7e13}},
    {"device": "cuda", "compute_capability": (6, 1)}, {"device": "mps"}], ids=str)
def test_techniques_see_the_precision_that_was_decided(facts: Facts, machine: dict[str, Any], pins: dict[str, Any]) -> None:
    hardware = replace(Hardware("a machine", "cpu", 2, 1 << 34, 1 << 33), **machine)
    recipe = Recipe.model_validate({"techniques": pins})
    try:
        plan = make_plan(replace(facts, hardware=hardware), recipe, 10)
    except ValueError:
        return                               # pinned on where it cannot be: there is no plan
    chosen = [step.technique.name for step in plan.steps if "precision" in step.technique.slots]
    assert workload_of(facts, plan).dtype == (chosen or ["fp32"])[0]


# ------------------------------------------------------------------------------------------------ 4 bits


def test_qlora_is_told_when_the_model_would_fit_unquantised(cases: Mapping[str, Any]) -> None:
    quantised = cases["qlora"].facts
    roomy = ask_anew(FourBitBase.name, quantised, RECIPE)
    tight = ask_anew("four_bit_base", replace(quantised, hardware=replace(quantised.hardware, free_memory_bytes=1000)), RECIPE)
    assert isinstance(roomy, Proposal)
    assert isinstance(tight, Proposal)
    assert "method=lora would fit too" in roomy.because
    assert "too much" in tight.because


def test_lora_is_told_of_qlora_where_memory_does_not_suffice(lora_facts: Facts, facts: Facts) -> None:
    roomy = ask_anew(FourBitBase.name, lora_facts, RECIPE)
    little = replace(lora_facts.hardware, free_memory_bytes=1000)
    tight = ask_anew(FourBitBase.name, replace(lora_facts, hardware=little), RECIPE)
    full = ask_anew(FourBitBase.name, facts, RECIPE)
    assert [answer.why for answer in (roomy, tight, full)] == [Why.NOT_NEEDED, Why.CHANGES_RESULT, Why.DOES_NOT_APPLY]
    assert tight.cure == ("method=qlora",)
    assert all(isinstance(answer, Refusal) and answer.possible is None for answer in (roomy, tight, full))
