"""When blocks are run by hand, that it is noticed if they are not, and that a run with them learns the same."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kinds_of_runs import LORA, make_ragged, ragged_facts

from powertrain.facts.software import read_software
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels import build
from powertrain.models.kernels.fused.compiled import tokens_to_divide
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, NotApplied, Proposal, Refusal, WrongUse
from powertrain.records.plan import Why
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import CannotBuild
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.fused_adamw import FusedAdamW
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.packing import Packing
from powertrain.training.loop import evaluate, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

LONG = Recipe(max_steps=100_000)


@pytest.fixture(autouse=True)
def forgotten_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def nothing_built_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_built", lambda *_: False)


@pytest.fixture
def slow(facts: Facts) -> Facts:
    """A machine that has all that is needed, and a model that keeps it busy."""
    hardware = replace(facts.hardware, device="cpu", instructions=(), peak_flops_per_s={"fp32": 2e11},
                       bandwidth_bytes_per_s=4e10)
    facts = ragged_facts(facts, None)
    model = replace(facts.model, layers=12, width=512, matmul_parameters=38_000_000)
    return replace(facts, hardware=hardware, software=replace(facts.software, missing={}), model=model)


def refusal(facts: Facts, recipe: Recipe = LONG) -> Refusal:
    answer = ask_anew(FusedBlocks.name, facts, recipe)
    assert isinstance(answer, Refusal)
    return answer


def leave_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As dropout or a base in 8 bits would."""
    monkeypatch.setattr(FusedBlocks, "_takes_cpp", classmethod(lambda cls, run: False))


@pytest.mark.parametrize("kernels", ["cpp", "compiled"])
def test_it_is_for_runs_that_earn_the_compilation_back(slow: Facts, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by = FusedBlocks("cpp") if kernels == "cpp" else FusedBlocks(ahead=True)
    if kernels == "compiled":
        leave_to_torch(monkeypatch)
    answer = ask_anew(FusedBlocks.name, slow, LONG)
    assert isinstance(answer, Proposal)
    assert "pays after step" in answer.because
    assert answer.technique == by                            # later runs load it
    short = refusal(slow, Recipe(max_steps=1))
    assert short.why is Why.WOULD_NOT_PAY
    assert short.possible == by
    monkeypatch.setattr(build, "is_built", lambda *_: True)
    assert isinstance(ask_anew(FusedBlocks.name, slow, Recipe(max_steps=1)), Proposal if kernels == "cpp" else Refusal)


def test_a_kernel_that_does_not_compile_gives_way_to_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object) -> None:
        raise build.CannotBuild("c++ failed: error: no such instruction")

    monkeypatch.setattr(build, "load", fail)
    with pytest.raises(CannotBuild, match="no such instruction") as caught:
        FusedBlocks("cpp").build()
    assert caught.value.instead == FusedBlocks("compiled", ahead=True)


@pytest.mark.parametrize(("adapters", "why"), [(AdapterConfig(r=4, use_dora=True), "DoRA"),
                                               (AdapterConfig(r=4, kind="lslora"), "LS-LoRA"),
                                               (AdapterConfig(r=4, dropout=0.1), "different inputs")])
def test_adapters_without_a_pass_by_hand_are_refused(facts: Facts, adapters: AdapterConfig, why: str) -> None:
    found = refusal(ragged_facts(facts, adapters))
    assert why in found.because
    assert found.possible is None


def test_it_steps_back_where_activations_are_computed_again(slow: Facts) -> None:
    pinned = Recipe.model_validate({"max_steps": 100_000, "techniques": {"activation_checkpointing": "on"}})
    assert (refusal(slow, pinned).why, refusal(slow, pinned).rival) == (Why.SLOT_TAKEN, "activation_checkpointing")
    plan = make_plan(slow, pinned, 100_000)
    assert {"activation_checkpointing"} <= {step.technique.name for step in plan.steps}
    tight = replace(slow, hardware=replace(slow.hardware, free_memory_bytes=1 << 20))
    assert refusal(tight).why is Why.NO_ROOM


def test_blocks_of_one_length_are_left_to_the_compiler(slow: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    equal = replace(slow, data=replace(slow.data, kind="blocks", length_quantiles={}))
    assert "fused_blocks" in [step.technique.name for step in make_plan(equal, LONG, 100_000).steps]      # by our own kernel
    leave_to_torch(monkeypatch)
    assert refusal(equal).possible == FusedBlocks()

    def names(recipe: Recipe) -> list[str]:
        return [step.technique.name for step in make_plan(equal, recipe, 100_000).steps]

    pinned = Recipe.model_validate({"max_steps": 100_000, "techniques": {"fused_blocks": "on"}})
    assert "torch_compile" in names(LONG)
    assert "fused_blocks" not in names(LONG)
    assert "fused_blocks" in names(pinned)
    assert "torch_compile" not in names(pinned)
    assert "fused_blocks" in [step.technique.name for step in make_plan(slow, LONG, 100_000).steps]


def test_blocks_of_one_length_with_dropout_are_written_by_hand_on_a_cpu(slow: Facts) -> None:
    equal = replace(slow, data=replace(slow.data, kind="blocks", length_quantiles={}))
    dropping = replace(equal, model=replace(equal.model, dropout=0.2))
    names = [step.technique.name for step in make_plan(dropping, LONG, 100_000).steps]
    assert "fused_blocks" in names
    assert "torch_compile" not in names


def small(slow: Facts, **changes: Any) -> Facts:
    """A machine whose products take no time beside the calls that begin them."""
    peaks = {dtype: 1e3 * peak for dtype, peak in slow.hardware.peak_flops_per_s.items()}
    return replace(slow, hardware=replace(slow.hardware, peak_flops_per_s=peaks), model=replace(slow.model, **changes))


def with_kernels(kernels: str) -> Recipe:
    return Recipe.model_validate({"max_steps": 100_000, "techniques": {"fused_blocks": {"kernels": kernels}}})


def test_blocks_too_small_for_the_calls_are_one_call_each(slow: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_built", lambda source: source == build.RAGGED)
    assert refusal(small(slow), Recipe(max_steps=1)).possible == FusedBlocks("one_call")     # compiling it would not pay
    monkeypatch.setattr(build, "is_built", lambda *_: True)
    answer = ask_anew(FusedBlocks.name, small(slow), Recipe(max_steps=1))
    assert isinstance(answer, Proposal)
    assert answer.technique == FusedBlocks("one_call")


@pytest.mark.parametrize(("changes", "why"), [
    ({"dropout": 0.1}, "has dropout"), ({"parallel_residual": True}, "residual is parallel"), ({"width": 63}, "not even"),
    ({"trainable": 1}, "not trained")])
def test_what_cannot_be_one_call_is_left_as_it_is_where_it_is_too_small(slow: Facts, changes: dict[str, Any], why: str) -> None:
    assert "calling compiled code" in refusal(small(slow, **changes)).because
    with pytest.raises(WrongUse, match=f"{why}; use other kernels"):
        make_plan(replace(slow, model=replace(slow.model, **changes)), with_kernels("one_call"), 100)


def test_the_recipe_may_ask_for_other_kernels_or_for_one_call(slow: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_built", lambda *_: True)

    def kernels(facts: Facts, asked: str) -> str:
        plan = make_plan(facts, with_kernels(asked), 100)
        return next(step.technique.kernels for step in plan.steps if isinstance(step.technique, FusedBlocks))

    assert (kernels(small(slow), "cpp"), kernels(slow, "one_call"), kernels(slow, "cpp")) == ("cpp", "one_call", "cpp")
    saved = ask_anew("saved_activations", slow, with_kernels("one_call"))
    assert isinstance(saved, Refusal)
    assert "nothing of it is recomputed" in saved.because


def test_a_run_of_blocks_in_one_call_learns_the_same() -> None:
    def losses(setup: Setup) -> list[float]:
        return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, 6), 1.0)]

    setup = FusedBlocks("one_call").apply(AttentionKernel("ragged").apply(make_ragged(None)))
    FusedBlocks("one_call").confirm(setup)
    found = losses(setup)
    assert found == pytest.approx(losses(make_ragged(None)), rel=1e-5)
    assert abs(found[-1] - found[0]) > 1e-3


def test_blocks_in_one_call_that_run_plainly_are_noticed() -> None:
    setup = FusedBlocks("one_call").apply(AttentionKernel("bmm").apply(make_ragged(None)))
    with pytest.raises(NotApplied, match=r"0 of \d blocks that train are recorded"):
        FusedBlocks("one_call").confirm(setup)
    with pytest.raises(NotApplied, match=r"not all of its weights are trained in fp32; use .*\.kernels=cpp"):
        FusedBlocks("one_call").apply(make_ragged(LORA))


def test_it_is_compiled_for_enough_tokens_to_be_divided_among_the_threads() -> None:
    setup = make_ragged(LORA)
    assert len(setup.few_tokens(1).lengths) == 2
    assert sum(setup.few_tokens(40).lengths) >= 40
    assert sum(setup.few_tokens(10**9).lengths) == sum(batch.tokens.numel() for batch in setup.prepare(0))
    assert tokens_to_divide(64) >= 2 * tokens_to_divide(128) - 2 >= torch.get_num_threads() * 512 // 64 - 2


@pytest.mark.parametrize("missing", ["c++ compiler", "python headers"])
def test_without_a_compiler_it_says_what_is_missing(slow: Facts, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "python headers":
        leave_to_torch(monkeypatch)
    assert missing in refusal(replace(slow, software=replace(slow.software, missing={missing: "not installed"}))).because


@pytest.mark.parametrize(("kind", "compiling"), [("blocks", {"torch_compile"}), ("conversation", {"fused_blocks", "triton"})])
def test_on_a_gpu_without_a_c_compiler_nothing_is_compiled_and_the_plan_says_why(
        slow: Facts, kind: str, compiling: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = replace(slow.hardware, device="cuda", compute_capability=(9, 0))
    there = replace(slow, hardware=hardware, data=replace(slow.data, kind=kind))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("torch", "triton") or None)
    monkeypatch.delenv("CC", raising=False)

    def answers(command: str | None) -> dict[str, Refusal | Proposal]:
        monkeypatch.setattr(shutil, "which", lambda name: command if name == "gcc" else None)
        facts = replace(there, software=read_software(hardware))
        assert make_plan(facts, LONG, 100_000).steps
        written = Recipe.model_validate({"max_steps": 100_000, "techniques": {"fused_blocks": {"kernels": "triton"}}})
        return {"torch_compile": ask_anew("torch_compile", facts, LONG), "fused_blocks": ask_anew("fused_blocks", facts, LONG),
                "triton": ask_anew("fused_blocks", facts, written)}

    def missing(answers: dict[str, Refusal | Proposal]) -> dict[str, str]:
        return {name: answer.because for name, answer in answers.items()
                if isinstance(answer, Refusal) and answer.why is Why.PART_MISSING}

    assert not missing(answers("/usr/bin/gcc"))
    found = missing(answers(None))
    assert set(found) == compiling
    assert all(because.endswith("there is no gcc or clang on the PATH (apt install build-essential)")
               for because in found.values())


def in_force(setup: Setup, *others: Any) -> Setup:
    techniques = (AttentionKernel("bmm"), FusedBlocks(), *others)
    for technique in techniques:
        setup = technique.apply(setup)
    for technique in techniques:
        technique.confirm(setup)
    return setup


@pytest.mark.parametrize(("adapters", "four_bit"), [(None, False), (LORA, False), (LORA, True)], ids=["full", "lora", "qlora"])
def test_a_run_learns_the_same(adapters: AdapterConfig | None, four_bit: bool) -> None:
    def losses(setup: Setup) -> list[float]:
        return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, 6), 1.0)]

    others = (FusedAdamW(), Packing(100), *((FrozenBackward(),) if adapters else ()))
    by_hand = in_force(make_ragged(adapters, four_bit=four_bit), *others)
    found, expected = losses(by_hand), losses(make_ragged(adapters, four_bit=four_bit))
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found[-1] - found[0]) > 1e-3
    held_out = [by_hand.examples[i] for i in range(8)]
    assert evaluate(by_hand, held_out, tokens_per_byte=None).loss < found[0] + 1


def test_blocks_that_run_plainly_are_noticed() -> None:
    with pytest.raises(NotApplied, match="blocks are run by"):
        FusedBlocks().confirm(make_ragged(LORA))


def test_a_compiler_that_silently_runs_the_parts_as_they_are_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with pytest.raises(NotApplied, match="nothing was compiled"):
        FusedBlocks().confirm(FusedBlocks().apply(make_ragged(LORA)))


def test_checkpointing_on_top_is_noticed() -> None:
    """It would compute nothing again, and save nothing."""
    setup = ActivationCheckpointing().apply(FusedBlocks().apply(make_ragged(LORA)))
    with pytest.raises(NotApplied, match="recomputes nothing"):
        FusedBlocks().confirm(setup)


def test_every_length_of_a_pass_is_served_by_the_same_code() -> None:
    from torch._dynamo.utils import counters

    setup = in_force(make_ragged(LORA), Packing(100))
    counters.clear()
    sizes = {sum(batch.lengths) for step in range(4) for batch in setup.prepare(step)}
    list(train(setup, new_state(setup, 0.0), Schedule("constant", 1e-3, 4), 1.0))
    assert len(sizes) > 4
    assert not counters["stats"].get("unique_graphs")


def test_our_own_kernel_is_refused_on_a_gpu(gpu_facts: Callable[..., Facts]) -> None:
    pinned = Recipe.model_validate({"max_steps": 100_000, "techniques": {"fused_blocks": {"kernels": "cpp"}}})
    with pytest.raises(WrongUse, match="for CPUs, and this run computes on 'cuda'; use kernels=compiled"):
        make_plan(ragged_facts(gpu_facts((9, 0)), None), pinned, 100)
