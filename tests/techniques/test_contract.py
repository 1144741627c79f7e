"""The contract that every technique keeps. A new technique is covered by adding it to CATALOGUE."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import powertrain.techniques
from not_compiled import NotCompiled
from powertrain.cost.workload import Workload
from powertrain.planner import ask_anew
from powertrain.recipe import Recipe
from powertrain.records import Effect, Facts, NotApplied, Plan, Proposal
from powertrain.techniques import CATALOGUE, Technique
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import Exactness
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.whole_pass import WholePass
from powertrain.training.loop import apply_plan, backward, evaluate, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, changed_fields

# relative, of losses over a few steps; bf16 and fp16 round each product, to 2^-9 and 2^-11
TOLERANCE = {Exactness.BITWISE: 0.0, Exactness.ROUNDING: 1e-4, Exactness.LOSSY: 5e-2}
PRECISION_TOLERANCE = {"bf16": 1e-2, "fp16": 3e-3, "tf32": 1e-3}
pytestmark = pytest.mark.usefixtures("restored_process")


def here(technique: type[Technique], cases: Mapping[str, Any]) -> tuple[Any, Proposal]:
    """The first kind of run in which the technique can be, asked for or not; the last refusal is the skip reason."""
    for case in cases.values():
        answer = ask_anew(technique.name, case.facts, as_needed(technique, case.recipe))
        if isinstance(answer, Proposal):
            return as_planned(case, answer), answer
        if answer.possible is not None:
            pinned = Effect((1.0, 1.0), 0, "guess: pinned by the test")
            return as_planned(case, answer), Proposal(answer.possible, answer.because, pinned)
    pytest.skip(answer.because)


def as_needed(technique: type[Technique], recipe: Recipe) -> Recipe:
    """The recipe with what the technique needs of others."""
    pins = {"attention_kernel": {"kernel": "ragged"}, "fused_blocks": {"kernels": "one_call"}}
    return recipe.model_copy(update={"techniques": {**recipe.techniques, **pins}}) if technique is WholePass else recipe


def as_planned(case: Any, answer: Any) -> Any:
    """The case with the kernels that a block in one call, and then a whole pass, are planned with."""
    planned = {getattr(answer, "technique", None), getattr(answer, "possible", None)}
    if not planned & {FusedBlocks("one_call"), WholePass()}:
        return case

    def make() -> Setup:
        setup = AttentionKernel("ragged").apply(case.make_setup())
        return FusedBlocks("one_call").apply(setup) if WholePass() in planned else setup

    return dataclasses.replace(case, make_setup=make)


def without(case: Any) -> Setup:
    """A setup of this kind in which the technique is not in force."""
    return (case.make_without or case.make_setup)()


def losses_of(setup: Setup, steps: int = 3) -> list[float]:
    torch.manual_seed(11)
    return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-3, steps), 1.0)]


def gradients_of(setup: Setup) -> list[torch.Tensor]:
    """Of the first step's mean loss, one for each weight that is trained."""
    micro_batches = setup.prepare(0)
    backward(setup, new_state(setup, 0.1).scaler, micro_batches, sum(batch.trained_tokens for batch in micro_batches))
    return [parameter.grad for parameter in setup.model.parameters() if parameter.requires_grad]


def test_every_file_is_in_the_catalogue() -> None:
    files = {path.stem for path in Path(str(powertrain.techniques.__file__)).parent.glob("*.py")} - {"__init__", "base"}
    assert files == {technique.name for technique in CATALOGUE}


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda technique: technique.name)
class TestContract:
    def test_it_says_what_it_is_and_where_it_comes_from(self, technique: type[Technique]) -> None:
        assert inspect.getdoc(technique)
        assert technique.source
        assert re.fullmatch(r"[a-z]+s .{8,78}[^.]", technique.does)      # "multiplies matrices in bfloat16"
        assert technique.touches <= {field.name for field in dataclasses.fields(Setup)}

    @pytest.mark.parametrize("device", ["here", "gpu"])
    def test_it_answers_with_a_reason(self, technique: type[Technique], cases: Mapping[str, Any],
                                      gpu_facts: Callable[..., Facts], device: str) -> None:
        for case in cases.values():
            facts = case.facts if device == "here" else dataclasses.replace(case.facts, hardware=gpu_facts().hardware)
            answer = ask_anew(technique.name, facts, case.recipe if device == "here" else Recipe())
            assert len(answer.because) > 10
            if isinstance(answer, Proposal):
                kind = answer.claim.basis.split(":")[0]
                assert kind in {"formula", "study", "guess"}
                assert answer.claim.guessed == (kind == "guess")
                low, high = answer.claim.step_time
                assert 0 < low <= high

    def test_it_leaves_the_callers_setup_alone(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        case, step = here(technique, cases)
        setup = case.make_setup()
        before = dataclasses.replace(setup)
        dtypes = [parameter.dtype for parameter in setup.model.parameters()]
        changed = step.technique.apply(setup)
        assert not changed_fields(before, setup)
        assert changed_fields(setup, changed) <= technique.touches
        assert dtypes == [parameter.dtype for parameter in setup.model.parameters()]

    def test_it_keeps_the_losses(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        case, step = here(technique, cases)
        expected = losses_of(case.make_setup())
        found = losses_of(apply_plan(case.make_setup(), Plan((step,), ())))
        tolerance = PRECISION_TOLERANCE.get(technique.name, TOLERANCE[technique.exactness])
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=0)

    def test_it_evaluates_to_the_same_loss(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        case, step = here(technique, cases)
        changed, plain = apply_plan(case.make_setup(), Plan((step,), ())), case.make_setup()
        expected = evaluate(plain, plain.examples, tokens_per_byte=None).loss
        found = evaluate(changed, changed.examples, tokens_per_byte=None).loss
        tolerance = PRECISION_TOLERANCE.get(technique.name, TOLERANCE[technique.exactness])
        assert found == pytest.approx(expected, rel=tolerance or 1e-12)

    def test_confirm_notices_when_it_is_off(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        case, step = here(technique, cases)
        with pytest.raises(NotApplied):
            step.technique.confirm(without(case))

    def test_confirm_is_content_when_it_is_on(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        case, step = here(technique, cases)
        changed = step.technique.apply(case.make_setup())
        for enter_setting in changed.runtime:
            enter_setting()
        step.technique.confirm(changed)

    def test_a_no_op_in_its_place_is_caught(self, technique: type[Technique], cases: Mapping[str, Any],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
        case, step = here(technique, cases)
        monkeypatch.setattr(technique, "apply", lambda self, setup: setup)
        with pytest.raises(NotApplied):
            apply_plan(without(case), Plan((step,), ()))

    def test_its_arithmetic_is_a_workload(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        assert isinstance(here(technique, cases)[1].technique.reckon(Workload(14, 12, 14)), Workload)

    def test_it_keeps_out_of_another_librarys_model(self, technique: type[Technique], cases: Mapping[str, Any]) -> None:
        """Where transformers computes the model, what acts inside it refuses, and what acts around it answers as ever."""
        facts = dataclasses.replace(cases["lora"].facts, model=dataclasses.replace(cases["lora"].facts.model,
                                                                                   provider="transformers"))
        answer = ask_anew(technique.name, facts, Recipe())
        if technique.touches & {"attention", "run_block", "loss", "collate"}:
            assert not isinstance(answer, Proposal)
            assert answer.possible is None
            assert "transformers" in answer.because


@pytest.mark.parametrize("without", ["fused_blocks", "activation_checkpointing"])
@pytest.mark.parametrize("name", ["blocks", "examples", "lora", "padded"])
def test_the_whole_plan_keeps_the_losses_and_the_gradients(cases: Mapping[str, Any], name: str, without: str) -> None:
    """All exact techniques together, with everything pinned on that can be; precision stays fp32.

    What keeps activations and what computes them again exclude each other, and a whole pass has its own kernels. Blocks by hand
    are compiled in one of the cases.
    """
    case, taken, steps = cases[name], {"precision"}, []
    left_out = ("frozen_base", "eight_bit_adamw", without, "cuda_graph", "whole_pass")
    for technique in CATALOGUE:
        answer = ask_anew(technique.name, case.facts, case.recipe)
        wanted = answer.technique if isinstance(answer, Proposal) else answer.possible
        pinned_off = case.recipe.techniques.get(technique.name) == "off"
        if wanted is None or pinned_off or technique.slots & taken or technique.name in left_out:
            continue
        taken |= technique.slots
        if technique is FusedBlocks and name != "lora":
            wanted = NotCompiled()
        steps.append(Proposal(wanted, "test", Effect((1.0, 1.0), 0, "guess: pinned by the test")))
    assert len(steps) >= 8
    plan = Plan(tuple(steps), ())
    found, expected = losses_of(apply_plan(case.make_setup(), plan)), losses_of(case.make_setup())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=0)
    for gradient, plain in zip(gradients_of(apply_plan(case.make_setup(), plan)), gradients_of(case.make_setup()), strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
