from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from powertrain.planner import from_json, make_plan, to_json, workload_of
from powertrain.recipe import Recipe
from powertrain.records import Facts, Plan, WrongUse
from powertrain.techniques import CATALOGUE


def names(plan: Plan) -> set[str]:
    return {step.technique.name for step in plan.steps}


def pinned(**techniques: object) -> Recipe:
    return Recipe.model_validate({"techniques": techniques})


def test_every_technique_is_either_in_the_plan_or_refused_with_a_reason(facts: Facts) -> None:
    plan = make_plan(facts, Recipe(), 100)
    assert names(plan) | {refusal.technique for refusal in plan.refused} == {technique.name for technique in CATALOGUE}
    assert not names(plan) & {refusal.technique for refusal in plan.refused}
    assert all(refusal.because for refusal in plan.refused)


def test_a_plan_survives_the_file(facts: Facts) -> None:
    plan = make_plan(facts, pinned(loader={"workers": 2}), 100)
    again = from_json(json.loads(json.dumps(to_json(plan))))
    assert again.steps == plan.steps
    assert again.estimate == plan.estimate
    assert [(r.technique, r.because) for r in again.refused] == [(r.technique, r.because) for r in plan.refused]


def test_one_technique_per_slot_and_the_larger_claim_wins(gpu_facts: Callable[..., Facts]) -> None:
    plan = make_plan(gpu_facts((9, 0)), Recipe(), 100)
    assert "bf16" in names(plan)
    assert "tf32" not in names(plan)
    assert "bf16" in next(r.because for r in plan.refused if r.technique == "tf32")
    without = make_plan(gpu_facts((9, 0)), pinned(bf16="off"), 100)
    assert "tf32" in names(without)


def test_a_pin_decides_a_slot(gpu_facts: Callable[..., Facts]) -> None:
    assert "tf32" in names(make_plan(gpu_facts((9, 0)), pinned(tf32="on"), 100))
    with pytest.raises(WrongUse, match="both pinned on"):
        make_plan(gpu_facts((9, 0)), pinned(tf32="on", bf16="on"), 100)


def test_off_takes_a_technique_out(facts: Facts) -> None:
    plan = make_plan(facts, pinned(fused_adamw="off"), 100)
    assert "fused_adamw" not in names(plan)
    assert next(r.because for r in plan.refused if r.technique == "fused_adamw") == "switched off by the recipe"


def test_pinning_on_what_cannot_be_is_an_error_with_the_reason(facts: Facts) -> None:
    cpu = replace(facts, hardware=replace(facts.hardware, device="cpu"))
    with pytest.raises(WrongUse, match=r"tf32 is pinned on, and it cannot be: .* no TF32 units"):
        make_plan(cpu, pinned(tf32="on"), 100)


def test_pinning_on_what_would_not_pay_is_done_and_said(facts: Facts) -> None:
    plan = make_plan(facts, pinned(activation_checkpointing={"every": 2}), 100)
    step = next(s for s in plan.steps if s.technique.name == "activation_checkpointing")
    assert step.technique.every == 2  # type: ignore[attr-defined]
    assert "the plan would leave it off" in step.because


@pytest.mark.parametrize(("techniques", "says"), [
    ({"bf61": "on"}, "did you mean bf16?"), ({"loader": {"worker": 1}}, "did you mean workers?"),
    ({"loader": {"workers": "two"}}, "type int"), ({"loader": {"workers": True}}, "type int"),
    ({"loader": {"workers": -1}}, "0 or more"), ({"fused_adamw": {"speed": 1}}, "no setting 'speed'"),
    ({"attention_kernel": {"kernel": "fast"}}, "none of math"),
])
def test_a_pin_that_means_nothing_is_refused(facts: Facts, techniques: dict[str, object], says: str) -> None:
    with pytest.raises(WrongUse, match=says.replace("?", r"\?")):
        make_plan(facts, pinned(**techniques), 100)


def test_the_estimate_follows_the_plan(facts: Facts) -> None:
    plan = make_plan(facts, pinned(micro_batch={"examples": 2}, activation_checkpointing="on"), 100)
    workload = workload_of(facts, plan)
    assert (workload.micro_batch, workload.checkpoint_every) == (2, 1)
    assert plan.estimate is not None
    assert plan.estimate.steps == 100
    assert plan.estimate.step_s[0] >= plan.estimate.floor_s


def test_without_measured_peaks_there_is_a_plan_and_no_estimate(facts: Facts) -> None:
    unknown = replace(facts, hardware=replace(facts.hardware, peak_flops_per_s={}, bandwidth_bytes_per_s=None))
    assert make_plan(unknown, Recipe(), 100).estimate is None


def test_a_plan_without_one_technique_is_its_ablation(facts: Facts) -> None:
    plan = make_plan(facts, Recipe(), 100)
    assert names(plan.without("fused_adamw")) == names(plan) - {"fused_adamw"}
    with pytest.raises(KeyError, match="tf32"):
        plan.without("tf32")


def test_a_plan_of_another_version_names_what_is_missing() -> None:
    with pytest.raises(WrongUse, match="warp_drive"):
        from_json({"steps": [{"technique": "warp_drive", "settings": {}, "because": "", "claim": {}}], "refused": []})
