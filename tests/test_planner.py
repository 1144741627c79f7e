from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powertrain import techniques
from powertrain.cost.collectives import Division, collectives_of, exchanged_s, sends_of
from powertrain.cost.estimate import estimate
from powertrain.cost.fitting import PLANNED_SHARE
from powertrain.facts.model import model_facts
from powertrain.models.config import make_config
from powertrain.models.kernels import build
from powertrain.planner import (
    Tuned,
    from_json,
    make_plan,
    processes_of,
    to_json,
    with_built_code,
    with_pins,
    with_steps,
    without_shares,
    workload_of,
)
from powertrain.recipe import Recipe
from powertrain.records import Effect, Facts, PeerLink, Plan, Proposal, WrongUse
from powertrain.records.evidence import Interval
from powertrain.records.plan import PinRefused, PinsClash, Why
from powertrain.report.plan import expected_rows
from powertrain.techniques import CATALOGUE
from powertrain.techniques.allocator import Allocator
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import CannotBuild
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.packing import Packing
from powertrain.techniques.tf32 import Tf32
from powertrain.techniques.whole_pass import WholePass
from powertrain.training.optimizers import OPTIMIZERS


def names(plan: Plan) -> set[str]:
    return {step.technique.name for step in plan.steps}


def pinned(**pins: object) -> Recipe:
    return Recipe.model_validate({"techniques": pins})


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
    with pytest.raises(PinsClash, match="both pinned on") as raised:
        make_plan(gpu_facts((9, 0)), pinned(tf32="on", bf16="on"), 100)
    assert (raised.value.technique, raised.value.rival) == ("bf16", "tf32")
    lost = next(r for r in make_plan(gpu_facts((9, 0)), pinned(tf32="on"), 100).refused if r.technique == "bf16")
    assert (lost.why, lost.rival) == (Why.SLOT_TAKEN, "tf32")


def test_off_takes_a_technique_out(facts: Facts) -> None:
    plan = make_plan(facts, pinned(fused_adamw="off"), 100)
    assert "fused_adamw" not in names(plan)
    off = next(r for r in plan.refused if r.technique == "fused_adamw")
    assert (off.why, off.cure) == (Why.OFF_IN_RECIPE, ("techniques.fused_adamw=on",))


def test_pinning_on_what_cannot_be_is_an_error_with_the_reason(facts: Facts) -> None:
    cpu = replace(facts, hardware=replace(facts.hardware, device="cpu"))
    with pytest.raises(PinRefused, match=r"techniques\.tf32 is pinned on .* no TF32 units") as raised:
        make_plan(cpu, pinned(tf32="on"), 100)
    assert (raised.value.technique, raised.value.refusal.why) == ("tf32", Why.HARDWARE_LACKS)
    assert (raised.value.keys, raised.value.cure) == (("techniques.tf32",), ("techniques.tf32=off",))


def test_pinning_on_what_would_not_pay_is_done_and_said(facts: Facts) -> None:
    plan = make_plan(facts, pinned(activation_checkpointing={"every": 2}), 100)
    step = next(s for s in plan.steps if s.technique.name == "activation_checkpointing")
    assert step.technique.every == 2  # type: ignore[attr-defined]
    assert step.pinned
    assert step.against is not None
    assert step.against.why is Why.NOT_NEEDED
    assert step.against.because in step.because              # in words: the planner would leave it off


@pytest.mark.parametrize(("pins", "says"), [
    ({"bf61": "on"}, "did you mean bf16?"), ({"loader": {"worker": 1}}, "did you mean workers?"),
    ({"loader": {"workers": "two"}}, "type int"), ({"loader": {"workers": True}}, "type int"),
    ({"loader": {"workers": -1}}, "0 or more"), ({"fused_adamw": {"speed": 1}}, "no setting 'speed'"),
    ({"attention_kernel": {"kernel": "fast"}}, "none of math"),
])
def test_a_pin_that_means_nothing_is_refused(facts: Facts, pins: dict[str, object], says: str) -> None:
    with pytest.raises(WrongUse, match=says.replace("?", r"\?")):
        make_plan(facts, pinned(**pins), 100)


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


SPEED = Interval(1.12, 1.08, 1.15)


def tuned(least_steps: Mapping[str, int] | None = None, **pins: object) -> Tuned:
    return Tuned(pins, SPEED, "2026-11-21", "2026-11-21_tuning", least_steps or {})


def step_of(plan: Plan, name: str) -> Proposal:
    return next(step for step in plan.steps if step.technique.name == name)


def test_what_was_measured_goes_before_a_techniques_own_answer(facts: Facts) -> None:
    plan = make_plan(facts, Recipe(), 100, tuned(loader={"workers": 2}, fused_adamw="off"))
    because = "measured on 2026-11-21: 1.12 times as fast as without this tuning (1.08 to 1.15), study 2026-11-21_tuning"
    step = step_of(plan, "loader")
    assert step.technique.workers == 2  # type: ignore[attr-defined]
    assert step.because == because
    assert step.claim.step_time == pytest.approx((1 / 1.15, 1 / 1.08))
    assert step.claim.basis.startswith("study: 2026-11-21_tuning")
    assert next(refusal.because for refusal in plan.refused if refusal.technique == "fused_adamw") == because
    untouched = make_plan(facts, Recipe(), 100)
    assert step_of(plan, "attention_kernel") == step_of(untouched, "attention_kernel")


def test_a_users_pin_wins_over_what_was_measured(facts: Facts) -> None:
    plan = make_plan(facts, pinned(loader={"workers": 1}, fused_adamw="on"), 100, tuned(loader="off", fused_adamw="off"))
    assert {"loader", "fused_adamw"} <= names(plan)
    assert "measured on" not in step_of(plan, "loader").because


def test_a_tuned_technique_that_cannot_be_any_more_leaves_the_plans_own_answer(facts: Facts) -> None:
    cpu = replace(facts, hardware=replace(facts.hardware, device="cpu"))
    plan = make_plan(cpu, Recipe(), 100, tuned(tf32={}, gone={}, loader={"workers": 2}, activation_checkpointing={"evry": 2}))
    assert "tf32" not in names(plan)
    assert "no TF32 units" in next(refusal.because for refusal in plan.refused if refusal.technique == "tf32")
    assert "activation_checkpointing" not in names(plan)
    assert "which this run leaves out" in step_of(plan, "loader").because


def test_a_tuned_technique_wins_its_slot_unless_the_user_wants_another(gpu_facts: Callable[..., Facts]) -> None:
    assert "tf32" in names(make_plan(gpu_facts((9, 0)), Recipe(), 100, tuned(tf32={})))
    plan = make_plan(gpu_facts((9, 0)), pinned(bf16="on"), 100, tuned(tf32={}))
    assert "bf16" in names(plan)
    assert "tf32" not in names(plan)


def test_a_kernel_that_does_not_compile_gives_way_to_one_that_needs_no_compiler(
        facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object) -> None:
        raise build.CannotBuild("c++ failed: error: no such instruction")

    monkeypatch.setattr(build, "load", fail)
    plan = make_plan(facts, pinned(attention_kernel={"kernel": "ragged"}), 100)
    with pytest.raises(CannotBuild, match="no such instruction"):
        with_built_code(plan)
    chosen = replace(plan, steps=tuple(replace(step, pinned=False) for step in plan.steps))
    built, failed = with_built_code(chosen)
    assert "no such instruction" in failed["attention_kernel"]
    before, after = ({step.technique.name: step.technique for step in one.steps} for one in (chosen, built))
    changed = {name: (before[name], after.get(name)) for name in before if before[name] != after.get(name)}
    assert changed == {"allocator": (Allocator("pool"), Allocator("glibc")),
                       "attention_kernel": (AttentionKernel("ragged"), AttentionKernel("bmm")),
                       "fused_blocks": (FusedBlocks("one_call"), None),         # of a small model
                       "whole_pass": (WholePass(), None)}
    assert "no such instruction" in next(found.because for found in built.refused if found.technique == "fused_blocks")
    assert built.estimate == chosen.estimate


def test_what_has_to_earn_back_its_start_is_for_long_runs(facts: Facts) -> None:
    short, long = (make_plan(facts, Recipe(), steps, tuned({"loader": 500}, loader={})) for steps in (499, 500))
    assert "loader" not in names(short)
    assert "loader" in names(long)


def test_a_tuned_plan_that_does_not_fit_any_more_is_not_used(facts: Facts) -> None:
    found = tuned(micro_batch={"examples": 14}, loader={})
    needed = make_plan(facts, Recipe(), 100, found).estimate
    assert needed is not None
    less = replace(facts, hardware=replace(facts.hardware, free_memory_bytes=needed.total_memory_bytes - 1))
    assert "loader" in names(make_plan(facts, Recipe(), 100, found))
    assert "loader" not in names(make_plan(less, Recipe(), 100, found))


def test_steps_are_put_in_their_place_of_the_catalogue_and_of_their_slot(facts: Facts) -> None:
    plan = make_plan(facts, pinned(micro_batch={"examples": 2}), 100)
    moved = with_steps(plan.without("fused_adamw"), [step_of(plan, "fused_adamw")])
    assert [step.technique for step in moved.steps] == [step.technique for step in plan.steps]
    other = replace(step_of(plan, "micro_batch"), technique=Packing())
    assert "micro_batch" not in names(with_steps(plan, [other]))


def test_further_pins_leave_the_recipes_own() -> None:
    assert with_pins(pinned(loader="off"), {"loader": {}, "bf16": "off"}).techniques == {"loader": "off", "bf16": "off"}


# ------------------------------------------------------------------------------------------------ what was decided before


def test_no_technique_looks_at_another_ones_pin() -> None:
    """What others decided is in `decided`; of the recipe's pins a technique may read its own alone."""
    folder = Path(str(techniques.__file__)).parent
    reads = [f"{path.name}: {line.strip()}" for path in folder.glob("*.py") for line in path.read_text().splitlines()
             if "recipe.techniques" in line and "recipe.techniques.get(cls.name)" not in line]
    assert not reads


def test_what_loses_its_slot_to_a_later_technique_leaves_no_trace(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 is proposed first and loses to a faster one in its slot: what is asked between them sees no bf16."""
    there = replace(facts, hardware=replace(facts.hardware, device="cpu", instructions=("avx512_bf16",),
                                            peak_flops_per_s={"fp32": 1e11, "bf16": 2e11}))
    assert workload_of(there, make_plan(there, Recipe(), 100)).dtype == "bf16"

    def faster(*_: object) -> Proposal:
        return Tf32().on("a test wants it", Effect((0.01, 0.02), 0, "guess: a test"))

    monkeypatch.setattr(Tf32, "propose", faster)
    plan = make_plan(there, Recipe(), 100)
    lost = next(refusal for refusal in plan.refused if refusal.technique == "bf16")
    assert (lost.why, lost.rival) == (Why.SLOT_TAKEN, "tf32")
    assert workload_of(there, plan).dtype == "tf32"


def test_plans_of_earlier_versions_read_without_the_new_fields(facts: Facts) -> None:
    written = to_json(make_plan(facts, Recipe(), 100))
    for step in written["steps"]:
        del step["numbers"], step["pinned"], step["against"]
    written["refused"] = [{"technique": refusal["technique"], "because": refusal["because"]} for refusal in written["refused"]]
    read = from_json(json.loads(json.dumps(written)))
    assert {refusal.why for refusal in read.refused} == {Why.UNKNOWN}
    assert [step.technique for step in read.steps] == [step.technique for step in make_plan(facts, Recipe(), 100).steps]


def test_every_refusal_has_a_kind_and_the_words_that_turn_it_on(facts: Facts, gpu_facts: Callable[..., Facts]) -> None:
    for here in (facts, gpu_facts((9, 0)), gpu_facts((7, 5))):
        for refusal in make_plan(here, Recipe(), 100).refused:
            assert refusal.why is not Why.UNKNOWN
            assert refusal.possible is None or f"techniques.{refusal.technique}=on" in refusal.cure
            assert (refusal.why is Why.PART_MISSING) == bool(refusal.part)


def shared(facts: Facts, processes: int = 4, free_bytes: int | None = None) -> Facts:
    """The facts of one of several processes, with so much memory free."""
    room = facts.hardware.free_memory_bytes if free_bytes is None else free_bytes
    return replace(facts, hardware=replace(facts.hardware, processes=processes, free_memory_bytes=room))


def test_sharding_proposes_itself_where_a_process_cannot_hold_weights_gradients_and_state(facts: Facts) -> None:
    plenty = make_plan(shared(facts), Recipe(), 100)
    assert "data_parallel" in names(plenty)
    refusal = next(r for r in plenty.refused if r.technique == "sharding")
    assert (refusal.why, refusal.cure) == (Why.NOT_NEEDED, ("techniques.sharding=on",))
    # of a model of two blocks sharding gathers about all, so dividing each block would need less
    short = make_plan(shared(facts, free_bytes=int(refusal.numbers["needed_bytes"])), pinned(tensor_parallel="off"), 100)
    assert "sharding" in names(short)
    assert next(r for r in short.refused if r.technique == "data_parallel").rival == "sharding"
    assert processes_of(from_json(json.loads(json.dumps(to_json(short))))) == 4
    assert next(r for r in make_plan(facts, Recipe(), 100).refused if r.technique == "sharding").cure == ("--processes 2",)


def test_weights_that_fit_are_divided_where_a_step_beside_them_does_not_and_sums_of_gradients_are_all_that_is_exchanged(
        gpu_facts: Callable[..., Facts]) -> None:
    """Qwen3 8B on B200s: moments in host memory and recomputed blocks were planned, on devices that hold 1.3 times as much."""
    model = model_facts(make_config("llama", vocabulary=512, context=256, layers=24, width=1024, heads=16)[0])
    here = replace(gpu_facts(processes=8, devices=8), model=model)
    standing = next(r for r in make_plan(here, Recipe(), 100).refused if r.technique == "sharding").numbers["needed_bytes"]
    tight = replace(here, hardware=replace(here.hardware, free_memory_bytes=int(1.01 * standing / PLANNED_SHARE)))
    step = next(step for step in make_plan(tight, Recipe(), 100).steps if step.technique.name == "sharding")
    assert step.technique.stage == 1                               # type: ignore[attr-defined]
    assert "a step in passes of one example needs" in step.because


@pytest.mark.parametrize(("link", "says"), [(PeerLink(1e-6, 1e11), ""), (PeerLink(1.0, 1e6), "do not pay: use one device")])
def test_the_claim_of_several_processes_is_what_the_estimate_expects_beside_one(
        facts: Facts, gpu_facts: Callable[..., Facts], link: PeerLink, says: str) -> None:
    here = gpu_facts(processes=4, devices=4, links={"processes": link})
    plan = make_plan(here, Recipe(), 100)
    step = next(step for step in plan.steps if step.technique.name == "data_parallel")
    assert plan.estimate is not None
    assert plan.estimate.efficiency is not None
    low, high = plan.estimate.efficiency
    assert step.claim.step_time == pytest.approx((1 / (4 * high), 1 / (4 * low)))
    assert ("do not pay here" in step.because) is bool(says)
    row = dict(expected_rows(plan.estimate, here.hardware))["Efficiency"]
    assert says in row
    assert ("do not pay" in row) is bool(says)
    unknown = make_plan(gpu_facts(processes=4, devices=4), Recipe(), 100)
    assert next(step for step in unknown.steps if step.technique.name == "data_parallel").claim.step_time == (1 / 4, 1.0)


def test_a_plan_says_what_it_may_use_beside_what_is_free_and_when_several_processes_are_of_use(gpu_facts: Callable[..., Facts]
                                                                                             ) -> None:
    recipe = Recipe.model_validate({"techniques": {"cuda_graph": "off"}})
    plan = make_plan(gpu_facts(free_memory_bytes=70 << 30), recipe, 100)
    shown = {refusal.technique: refusal.because for refusal in plan.refused}
    assert "of the 56 GiB that a plan may use (80% of what is free)" in shown["activation_checkpointing"]
    assert not [because for because in shown.values() if "56 GiB free" in because or "56.0 GiB" in because]
    for name in ("sharding", "tensor_parallel", "pipeline_parallel", "data_parallel"):
        assert shown[name].startswith("the run has one process; on several GPUs --processes N (in a plan for others --machine ")


def test_processes_on_the_cores_of_one_machine_do_not_pay_and_the_plan_says_so(facts: Facts) -> None:
    """Two such processes were 0.86 times as fast as one with both cores (studies/2026-11-23_processes)."""
    here = shared(replace(facts, hardware=replace(facts.hardware, peak_flops_per_s={"fp32": 1e11, "bf16": 2e11},
                                                  bandwidth_bytes_per_s=1e10)))
    plan = make_plan(here, Recipe(), 100)
    step = next(step for step in plan.steps if step.technique.name == "data_parallel")
    assert step.claim.step_time[0] >= 1
    assert "they do not pay here" in step.because
    row = dict(expected_rows(plan.estimate, here.hardware))["Efficiency"]
    assert "times as fast as one with all cores of a machine does, so they do not pay: use one process" in row


@pytest.mark.parametrize(("share", "replicas"), [(0.6, 2), (0.3, 1)])
def test_weights_are_divided_within_a_machine_where_that_is_enough(
        facts: Facts, gpu_facts: Callable[..., Facts], share: float, replicas: int) -> None:
    """Two machines of four GPUs: the link within one is the faster, so only sums of gradients pass between them."""
    model = model_facts(make_config("llama", vocabulary=512, context=256, layers=24, width=1024, heads=16)[0])
    here = replace(gpu_facts(processes=8, nodes=2, devices=4), model=model)
    refusal = next(r for r in make_plan(here, pinned(tensor_parallel="off"), 100).refused if r.technique == "sharding")
    room = int(share * refusal.numbers["needed_bytes"])
    short = replace(here, hardware=replace(here.hardware, free_memory_bytes=room, memory_bytes=room))
    plan = make_plan(short, pinned(tensor_parallel="off"), 100)
    step = next(step for step in plan.steps if step.technique.name == "sharding")
    assert step.technique.replicas == replicas                     # type: ignore[attr-defined]
    assert ("between nodes" in step.because) is (replicas > 1)


def test_sharding_keeps_out_what_needs_whole_weights(facts: Facts) -> None:
    plan = make_plan(shared(facts), pinned(sharding={"stage": 2, "replicas": 2}), 100)
    step = next(step.technique for step in plan.steps if step.technique.name == "sharding")
    assert (step.processes, step.stage, step.replicas, step.shards) == (4, 2, 2, 2)  # type: ignore[attr-defined]
    assert {r.technique for r in plan.refused if r.rival == "sharding"} >= {"fused_blocks", "torch_compile", "flat_parameters"}
    sgd = replace(shared(facts), optimizer=OPTIMIZERS.named("sgd").facts_on("cpu"))
    refused = make_plan(sgd, pinned(sharding="on"), 100).refused
    assert next(refusal for refusal in refused if refusal.technique == "fused_adamw").rival == "sharding"
    with pytest.raises(PinRefused, match="works on whole ones"):
        make_plan(shared(facts), pinned(sharding="on", flat_parameters="on"), 100)
    with pytest.raises(PinsClash):
        make_plan(shared(facts), pinned(sharding="on", data_parallel="on"), 100)


def test_a_run_that_several_processes_have_divided_goes_on_in_one(facts: Facts) -> None:
    recipe = pinned(sharding={"stage": 2}, fused_adamw="off")
    with pytest.raises(PinRefused, match="the run has one process"):
        make_plan(facts, recipe, 100)
    assert not {"sharding", "fused_adamw"} & names(make_plan(facts, without_shares(recipe), 100))


@pytest.mark.parametrize(("settings", "says"), [
    ({"engine": "megatron"}, "megatron"), ({"stage": 4}, "stage=4 is none of 1, 2 and 3"),
    ({"replicas": 3}, "replicas=3 does not divide 4 processes"), ({"replicas": 4}, "groups of 2 or more")])
def test_sharding_that_cannot_be_is_refused_with_the_reason(facts: Facts, settings: dict[str, object], says: str) -> None:
    with pytest.raises(WrongUse, match=says):
        make_plan(shared(facts), pinned(sharding=settings), 100)


def test_sharding_refuses_what_cannot_be_divided(facts: Facts) -> None:
    four_bit = replace(facts, model=replace(facts.model, method="qlora", adapter_parameters=64, trainable=64))
    with pytest.raises(PinRefused, match="4 bits"):
        make_plan(shared(four_bit), pinned(sharding="on"), 100)
    muon = replace(facts, optimizer=OPTIMIZERS.named("muon").facts_on("cpu"))
    with pytest.raises(PinRefused, match="optimizer muon does not update each weight's elements"):
        make_plan(shared(muon), pinned(sharding="on"), 100)


def tall(facts: Facts, **model: Any) -> Facts:
    """The facts of a model of many blocks, with long examples."""
    config, _ = make_config("llama", **{"vocabulary": 500, "context": 512, "layers": 24, "width": 256, "heads": 8, **model})
    return replace(facts, model=model_facts(config), data=replace(facts.data, block=512))


def test_tensor_parallelism_is_used_if_asked_for_or_if_sharding_does_not_fit(facts: Facts) -> None:
    plenty = make_plan(shared(tall(facts)), Recipe(), 100)
    refusal = next(r for r in plenty.refused if r.technique == "tensor_parallel")
    assert (refusal.why, refusal.cure) == (Why.NOT_NEEDED, ("techniques.tensor_parallel=on",))
    needed = int(refusal.numbers["needed_bytes"])
    for share, used in ((1.0, "sharding"), (0.45, "tensor_parallel")):
        plan = make_plan(shared(tall(facts), free_bytes=int(share * needed)), Recipe(), 100)
        assert {"sharding", "tensor_parallel", "data_parallel"} & names(plan) == {used}
    one = next(r for r in make_plan(facts, Recipe(), 100).refused if r.technique == "tensor_parallel")
    assert one.cure == ("--processes 2",)


def test_asked_for_tensor_parallelism_divides_the_memory_of_each_process_and_keeps_out_what_needs_whole_weights(
        facts: Facts) -> None:
    alone, plans = make_plan(shared(tall(facts)), Recipe(), 100), {}
    for degree in (2, 4):
        plans[degree] = make_plan(shared(tall(facts)), pinned(tensor_parallel={"degree": degree}), 100)
        step = next(step.technique for step in plans[degree].steps if step.technique.name == "tensor_parallel")
        assert (step.processes, step.degree) == (4, degree)  # type: ignore[attr-defined]
    weights = [plan.estimate.memory_bytes["weights"] for plan in (alone, *plans.values()) if plan.estimate]
    assert weights[0] > 1.8 * weights[1] > 3.2 * weights[2]
    beaten = {refusal.technique for refusal in plans[2].refused if refusal.rival == "tensor_parallel"}
    assert beaten >= {"fused_blocks", "torch_compile", "data_parallel"}
    assert processes_of(from_json(json.loads(json.dumps(to_json(plans[2]))))) == 4
    with pytest.raises(PinsClash):
        make_plan(shared(facts), pinned(tensor_parallel="on", sharding="on"), 100)
    with pytest.raises(PinRefused, match="works on whole ones"):
        make_plan(shared(tall(facts)), pinned(tensor_parallel="on", flat_parameters="on"), 100)


@pytest.mark.parametrize(("model", "degree", "says"), [
    ({"heads": 6, "width": 252}, 4, r"4 processes cannot divide the 6 heads of each block evenly; use .*degree=2"),
    ({"kv_heads": 2}, 4, r"4 processes cannot divide the 2 kv heads of each block evenly; use .*degree=2"),
    ({"mlp_width": 682}, 4, r"4 processes cannot divide the 682 columns of the MLP of each block evenly; use .*degree=2"),
    ({"mlp_width": 681}, 2, r"4 processes cannot divide the 681 columns of the MLP of each block evenly; use .*sharding=on"),
    ({}, 3, r"degree=3 does not divide 4 processes into groups of 2 or more"),
    ({"dropout": 0.1}, 2, r"dropout \(0.1\) draws for each head of the attention, .*; use model.dropout=0")])
def test_tensor_parallelism_that_cannot_be_is_refused_with_the_cure(facts: Facts, model: dict[str, Any], degree: int, says: str
                                                                    ) -> None:
    with pytest.raises(WrongUse, match=says):
        make_plan(shared(tall(facts, **model)), pinned(tensor_parallel={"degree": degree}), 100)
    plan = make_plan(shared(tall(facts, **model)), Recipe(), 100)
    assert "tensor_parallel" not in names(plan)


def test_tensor_parallelism_refuses_what_cannot_be_divided(facts: Facts) -> None:
    adapted = replace(facts, model=replace(facts.model, method="lora", adapter_parameters=64, trainable=64))
    with pytest.raises(PinRefused, match="method=lora trains adapters"):
        make_plan(shared(adapted, 2), pinned(tensor_parallel="on"), 100)
    muon = replace(facts, optimizer=OPTIMIZERS.named("muon").facts_on("cpu"))
    with pytest.raises(PinRefused, match="optimizer muon does not update each weight's elements"):
        make_plan(shared(muon, 2), pinned(tensor_parallel="on"), 100)

def in_stages(facts: Facts, **model: object) -> Facts:
    """The facts of one of two processes, with a model whose blocks can be divided."""
    changes: dict[str, Any] = {"dropout": 0.0, "tied_head": False, **model}
    return shared(replace(facts, model=replace(facts.model, **changes)), 2)


def test_a_pipeline_says_how_long_its_stages_would_wait_and_is_used_only_if_asked_for(facts: Facts) -> None:
    refusal = next(r for r in make_plan(in_stages(facts), Recipe(), 100).refused if r.technique == "pipeline_parallel")
    assert (refusal.why, refusal.cure) == (Why.NOT_NEEDED, ("techniques.pipeline_parallel=on",))
    assert refusal.numbers["bubble_share"] == 1 / (refusal.numbers["passes"] + 1)
    assert refusal.numbers["stage_bytes"] < refusal.numbers["needed_bytes"]
    plan = make_plan(in_stages(facts), pinned(pipeline_parallel="on"), 100)
    assert processes_of(from_json(json.loads(json.dumps(to_json(plan))))) == 2
    assert {r.technique for r in plan.refused if r.rival == "pipeline_parallel"} >= {
        "fused_blocks", "torch_compile", "flat_parameters", "fp16", "data_parallel"}
    workload = workload_of(in_stages(facts), plan)
    assert (workload.stages, workload.micro_batches, refusal.numbers["passes"]) == (2, 7, 8)     # 2 of 14 examples each
    with pytest.raises(PinsClash):
        make_plan(in_stages(facts), pinned(sharding="on", pipeline_parallel="on"), 100)


def test_a_pipeline_is_expected_to_be_slower_by_its_bubble(facts: Facts) -> None:
    in_two = in_stages(facts)
    workload = replace(workload_of(in_two, make_plan(in_two, Recipe(), 100)), examples=12, micro_batch=2)
    plain, staged = (estimate(in_two.model, replace(workload, stages=stages), in_two.hardware, 1) for stages in (1, 2))
    sent = sends_of(in_two.model, 6, workload.pass_slots)
    assert sent.count == 12
    summed_s = exchanged_s(collectives_of(in_two.model, Division(2), 1), in_two.hardware)[0][0]
    sent_s = exchanged_s([sent], in_two.hardware)[0][0]
    assert staged.step_s[0] - sent_s == pytest.approx((plain.step_s[0] - summed_s) * 7 / 6)
    assert staged.memory_bytes["weights"] < 0.6 * plain.memory_bytes["weights"]


@pytest.mark.parametrize(("model", "recipe", "says"), [
    ({"tied_head": True}, {}, "the head is the embedding"), ({"layers": 5}, {}, "5 blocks do not divide into 2 equal stages"),
    ({"dropout": 0.1}, {}, "what dropout and noise draw would depend"), ({"adapter_dropout": 0.1}, {}, "lora.dropout=0"),
    ({"method": "qlora"}, {}, "4 bits"), ({"adapter_parameters": 64, "adapted_layers": (0,)}, {}, "a stage without adapters"),
    ({}, {"micro_batch": {"examples": 14}}, "a step has 1 pass, fewer than the 2 stages; use techniques.micro_batch"),
    ({}, {"flat_parameters": "on"}, "built for whole models")])
def test_a_pipeline_refuses_what_it_cannot_divide(facts: Facts, model: dict[str, object], recipe: dict[str, object],
                                                  says: str) -> None:
    with pytest.raises(PinRefused, match=says):
        make_plan(in_stages(facts, **model), pinned(pipeline_parallel="on", **recipe), 100)


def test_context_parallel_is_refused_until_it_is_built(facts: Facts) -> None:
    with pytest.raises(PinRefused, match="cannot divide a document among processes yet"):
        make_plan(shared(facts), pinned(context_parallel="on"), 100)
