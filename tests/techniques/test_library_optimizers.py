"""bitsandbytes' optimizers: where they are offered, and that they are the AdamW that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kinds_of_runs import LORA, make_ragged

from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, NotApplied, Proposal, Refusal, WrongUse
from powertrain.records.plan import Why
from powertrain.techniques.base import Technique
from powertrain.techniques.eight_bit_adamw import EightBitAdamW
from powertrain.techniques.paged_adamw import PagedAdamW
from powertrain.training.loop import new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.updates import library_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
RECIPE = Recipe()


def losses_of(setup: Setup) -> list[float]:
    return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, 4), 1.0)]


@pytest.mark.parametrize("technique", [EightBitAdamW, PagedAdamW])
def test_they_need_bitsandbytes_and_paging_an_nvidia_gpu(technique: type[Technique], facts: Facts,
                                                         gpu_facts: Callable[..., Facts]) -> None:
    here = ask_anew(technique.name, replace(facts, hardware=replace(facts.hardware, device="cpu")), RECIPE)
    without = replace(gpu_facts(), software=replace(facts.software, missing={"bitsandbytes": "not installed"}))
    neither = ask_anew(technique.name, without, RECIPE)
    assert isinstance(here, Refusal)
    assert isinstance(neither, Refusal)
    assert (neither.possible, neither.part) == (None, "bitsandbytes")
    assert (here.possible is None) is (technique is PagedAdamW)


def test_eight_bits_are_left_to_a_pin(gpu_facts: Callable[..., Facts]) -> None:
    plan = make_plan(gpu_facts(), RECIPE, 100)
    refused = next(r for r in plan.refused if r.technique == "eight_bit_adamw")
    assert (refused.why, refused.cure) == (Why.CHANGES_RESULT, ("techniques.eight_bit_adamw=on",))
    pinned = make_plan(gpu_facts(), Recipe.model_validate({"techniques": {"eight_bit_adamw": "on"}}), 100)
    names = [step.technique.name for step in pinned.steps]
    assert "eight_bit_adamw" in names
    assert "fused_adamw" not in names


def test_paging_is_for_moments_that_do_not_fit_and_then_takes_the_fused_updates_place(gpu_facts: Callable[..., Facts]) -> None:
    assert isinstance(ask_anew(PagedAdamW.name, gpu_facts(), RECIPE), Refusal)
    full = gpu_facts(free_memory_bytes=1000)
    assert isinstance(ask_anew(PagedAdamW.name, full, RECIPE), Proposal)
    names = [step.technique.name for step in make_plan(full, RECIPE, 100).steps]
    assert "paged_adamw" in names
    assert "fused_adamw" not in names


def test_states_in_eight_bits_train_nearly_alike() -> None:
    setup = EightBitAdamW().apply(make_ragged(LORA))
    EightBitAdamW().confirm(setup)
    group = new_state(setup, 0.1).optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, 0.1)
    assert losses_of(setup) == pytest.approx(losses_of(make_ragged(LORA)), rel=1e-2)


def test_paged_states_train_alike_where_there_is_nothing_to_page() -> None:
    assert losses_of(PagedAdamW().apply(make_ragged(LORA))) == pytest.approx(losses_of(make_ragged(LORA)), rel=1e-5)


def test_the_plain_optimizer_is_noticed_in_their_place() -> None:
    for technique in (EightBitAdamW(), PagedAdamW()):
        with pytest.raises(NotApplied, match="AdamW"):
            technique.confirm(make_ragged(LORA))


def test_step_counts_are_tensors_as_checkpoints_hold_them() -> None:
    setup = EightBitAdamW().apply(make_ragged(LORA))
    state = new_state(setup, 0.0)
    list(train(setup, state, Schedule("constant", 1e-2, 3), 1.0))
    assert {int(moments["step"]) for moments in state.optimizer.state.values()} == {3}
    assert all(isinstance(value, torch.Tensor) for moments in state.optimizer.state.values() for value in moments.values())


def test_without_bitsandbytes_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(WrongUse, match="pip install bitsandbytes"):
        library_optimizer("AdamW8bit")
