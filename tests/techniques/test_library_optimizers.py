"""bitsandbytes' optimizers: where they are offered, and that they are the AdamW that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kinds_of_runs import LORA, make_ragged

from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, NotApplied, Proposal, Refusal, WrongUse
from powertrain.records.checkpoints import FILES
from powertrain.records.plan import Why
from powertrain.techniques.base import Technique
from powertrain.techniques.eight_bit_adamw import EightBitAdamW
from powertrain.techniques.paged_adamw import PagedAdamW
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, new_state, train
from powertrain.training.optimizers import optimizer_of
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.updates import library_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
RECIPE = Recipe()
MakeSetup = Callable[..., Setup]


def with_optimizer(setup: Setup, name: str) -> Setup:
    return replace(setup, optimizer=optimizer_of(Recipe.model_validate({"optimizer": {"name": name}})))


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


SIZES = {"width": 64, "vocabulary": 256}     # eight tensors of 4,096 or more, in 8 bits


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit", "paged_adamw_8bit"])
def test_tensors_in_eight_bits_are_saved_and_resumed_to_the_byte(make_setup: MakeSetup, tmp_path: Path, name: str) -> None:
    """bitsandbytes gives all of them one table of quantiles, which no checkpoint could hold twice."""
    def begun() -> tuple[Setup, State]:
        setup = with_optimizer(make_setup(**SIZES), name)
        return setup, new_state(setup, 0.1)

    setup, state = begun()
    steps = train(setup, state, Schedule("constant", 1e-2, 4), 1.0)
    next(steps)
    large = [parameter for parameter, found in state.optimizer.state.items() if found["state1"].dtype == torch.uint8]
    assert len(large) > 2
    assert all(parameter.numel() >= 4096 for parameter in large)
    saved = save_checkpoint(tmp_path / "first", state)
    expected = [next(steps).loss, next(steps).loss]
    other, resumed = begun()
    load_checkpoint(saved, resumed)
    again = train(other, resumed, Schedule("constant", 1e-2, 4), 1.0)
    assert [next(again).loss, next(again).loss] == expected
    last, resaved = (save_checkpoint(tmp_path / folder, of) for folder, of in (("whole", state), ("resumed", resumed)))
    for file in FILES[:2]:
        assert (last / file).read_bytes() == (resaved / file).read_bytes()


@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw_8bit"])
def test_what_is_resumed_lies_in_memory_that_the_library_pages(make_setup: MakeSetup, tmp_path: Path, name: str,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes paged memory for tensors of 100,000 numbers or more, on a GPU; here it is marked instead."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    plain = Optimizer8bit.get_state_buffer

    def marked(self: Optimizer8bit, parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        memory: torch.Tensor = plain(self, parameter, dtype)
        memory.of_the_library = True         # type: ignore[attr-defined]
        return memory

    monkeypatch.setattr(Optimizer8bit, "get_state_buffer", marked)
    setup = with_optimizer(make_setup(**SIZES), name)
    state = new_state(setup, 0.1)
    next(train(setup, state, Schedule("constant", 1e-2, 4), 1.0))
    saved = save_checkpoint(tmp_path, state)
    resumed = new_state(setup, 0.1)
    load_checkpoint(saved, resumed)
    kept = [found[key] for found in resumed.optimizer.state.values() for key in ("state1", "state2")]
    assert len(kept) > 10
    assert all(getattr(memory, "of_the_library", False) for memory in kept)


def test_without_bitsandbytes_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(WrongUse, match="pip install bitsandbytes"):
        library_optimizer("AdamW8bit")
