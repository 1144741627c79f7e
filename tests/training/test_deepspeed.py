"""Processes whose gradients and optimizer state DeepSpeed divides make the same updates as one. gloo, on this machine."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sharded import RATE, STEPS, Case, adapted, full
from torch import Tensor

from driver import run_processes
from powertrain.records import NotApplied
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.records.json_files import read_json
from powertrain.techniques import fused_adamw, micro_batch, packing, sharding
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.guard import Guard
from powertrain.training.loop import State, evaluate, new_state, train
from powertrain.training.ranks import ALONE, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None,
                               reason='DeepSpeed is not installed: pip install "powertrain[deepspeed]"')
CASES = {
    "zero 1": Case(stage=1), "zero 2": Case(stage=2), "clipped, tied": Case(lambda: full(tied_head=True), 2, clip=0.05),
    "dropout": Case(lambda: full(dropout=0.2), 1), "lora": Case(adapted, 2),
    "fewer passes than processes": Case(stage=2, techniques=(packing.Packing(tokens=2000),)),
    "padded, fused": Case(stage=1, techniques=(fused_adamw.FusedAdamW(), micro_batch.MicroBatch(3)))}
SAVED_BY = {"two": 2, "one": 1, "lora": 2}   # processes; both numbers resume
SAVED_AT, GOES_ON = 2, 1


def setup_of(case: Case, ranks: Ranks) -> Setup:
    """Return the setup of a case, divided by the technique where there are several processes."""
    setup = case.setup()
    if ranks is ALONE:
        return setup
    setup = sharding.Sharding(ranks.world, case.stage, engine="deepspeed").apply(setup)
    for enter_setting in setup.runtime:
        enter_setting()
    return setup.shared_by(ranks)


def tensors_of(state: State) -> dict[str, Tensor]:
    """The weights and moments, whole, as the first process has them."""
    by_weight = state.optimizer.moments()
    trained = {name: weight for name, weight in state.model.named_parameters() if weight.requires_grad}
    return {**{name: weight.detach().clone() for name, weight in trained.items()},
            **{f"{name}.{key}": value.clone() for name, weight in trained.items()
               for key, value in by_weight.get(weight, {}).items()}}


def taken(case: Case, ranks: Ranks = ALONE) -> dict[str, Any]:
    setup = setup_of(case, ranks)
    state = new_state(setup, 0.1)
    steps = list(train(setup, state, Schedule("constant", RATE, STEPS), case.clip))
    return {"loss": torch.stack([step.loss for step in steps]), "norm": torch.stack([step.grad_norm for step in steps]),
            "held out": torch.tensor(evaluate(setup, setup.examples[:9], tokens_per_byte=None).loss),
            "clipped": int(state.clipped_steps), "state": tensors_of(state),
            "own": getattr(state.optimizer, "own_elements", None), "trained": sum(p.numel() for p in state.optimizer.moments())}


def case_of(name: str) -> Case:
    return Case(adapted, 2) if name == "lora" else Case(lambda: full(dropout=0.2), 2)


def saved(name: str, folder: Path, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Take steps and save; return the state that was saved."""
    setup = setup_of(case_of(name), ranks)
    state = new_state(setup, 0.1)
    list(train(setup, state, Schedule("constant", RATE, SAVED_AT), 1.0))
    save_checkpoint(folder / name, state, setup.ranks)
    return tensors_of(state)


def resumed(name: str, folder: Path, ranks: Ranks = ALONE) -> tuple[dict[str, Tensor], list[float]]:
    """Return the state that the checkpoint brought back, and the losses and norms of the steps after it."""
    setup = setup_of(case_of(name), ranks)
    state = new_state(setup, 0.1)
    newest, _ = newest_checkpoint(folder / name)
    assert newest is not None
    load_checkpoint(newest, state)
    found = tensors_of(state)
    steps = train(setup, state, Schedule("constant", RATE, SAVED_AT + GOES_ON + 1), 1.0)
    return found, [float(value) for step in steps for value in (step.loss, step.grad_norm)]


def refuted(spoil: Callable[[Any], object] | None = None) -> str:
    """Return why the technique is not in force, where `spoil` changes its division first; "" where it is in force."""
    technique = sharding.Sharding(2, 2, engine="deepspeed")
    setup = technique.apply(Case().setup())
    for enter_setting in setup.runtime:
        enter_setting()
    with pytest.MonkeyPatch.context() as patch:
        if spoil is not None:
            plain = setup.sharding._config()
            patch.setattr(type(setup.sharding), "_config", lambda self: spoil(plain))
        try:
            technique.confirm(setup)
        except NotApplied as error:
            return str(error)
    assert all(weight.grad is None for weight in setup.model.parameters())
    return ""


def broken_step(ranks: Ranks) -> list[Any]:
    """Return the norm of a step with a gradient that is not finite, and whether the weights stayed as they were."""
    setup = setup_of(Case(stage=2), ranks)
    state = new_state(setup, 0.1)
    before = [weight.detach().clone() for weight in setup.model.parameters()]
    handle = setup.model.get_submodule("norm").weight.register_hook(lambda gradient: gradient / 0)
    [step] = train(setup, state, Schedule("constant", RATE, 1), 1.0)
    handle.remove()
    return [float(step.grad_norm),
            all(map(torch.equal, before, (weight.detach() for weight in setup.model.parameters())))]


def passed_over(ranks: Ranks) -> list[bool]:
    """Return whether a finite step that a guard calls bad leaves the weights, and whether the next one is as a first one."""
    setup, other = setup_of(Case(stage=2), ranks), setup_of(Case(stage=2), ranks)
    state, fresh = (replace(new_state(one, 0.1), guard=Guard.on(one.device, spikes=False)) for one in (setup, other))
    assert state.guard is not None
    assert fresh.guard is not None
    before, judge = [weight.detach().clone() for weight in setup.model.parameters()], state.guard.judge
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.guard, "judge", lambda *given, **named: judge(*given, **named) | True)
        list(train(setup, state, Schedule("constant", RATE, 1), 1.0))
    stayed = all(map(torch.equal, before, (weight.detach() for weight in setup.model.parameters())))
    list(train(setup, state, Schedule("constant", RATE, 2), 1.0))
    fresh.guard.passed_over = 1              # begins with the second batch
    list(train(other, fresh, Schedule("constant", RATE, 1), 1.0))
    return [stayed, all(map(torch.equal, setup.model.parameters(), other.model.parameters()))]


def _process(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
        ranks = joined()
        results: dict[str, Any] = {name: taken(case, ranks) for name, case in CASES.items()}
        results["saved"] = {name: saved(name, folder, ranks) for name, count in SAVED_BY.items() if count == 2}
        results["resumed"] = {name: resumed(name, folder, ranks) for name in SAVED_BY}
        results["confirm"] = [refuted(), refuted(lambda config: {**config, "gradient_allreduce_op": "mean"})]
        results["broken"] = broken_step(ranks)
        results["passed over"] = passed_over(ranks)
        torch.save(results, folder / f"{rank}.pt")
        gc.collect()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("deepspeed")
    alone = {name: saved(name, folder) for name, count in SAVED_BY.items() if count == 1}
    run_processes(_process, 2, folder)
    processes = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    return {"processes": processes, "folder": folder, "saved": {**processes[0]["saved"], **alone}}


@installed
@pytest.mark.parametrize("name", CASES)
def test_deepspeed_takes_the_steps_of_one_process(found: Any, name: str) -> None:
    alone = taken(CASES[name])
    for one in (process[name] for process in found["processes"]):
        for figure in ("loss", "norm", "held out"):
            torch.testing.assert_close(one[figure], alone[figure], rtol=1e-6, atol=0)
        assert one["clipped"] == alone["clipped"]
        assert 0 <= one["own"] - one["trained"] / 2 <= 8
    assert alone["clipped"] == STEPS or name != "clipped, tied"
    first = found["processes"][0][name]["state"]
    assert first.keys() == alone["state"].keys()
    for key, expected in alone["state"].items():
        torch.testing.assert_close(first[key], expected, rtol=0, atol=(1e-6 if ".exp_avg" in key else 1e-5)
                                   * float(expected.abs().max()))


@installed
@pytest.mark.parametrize("name", SAVED_BY)
def test_one_and_two_processes_resume_the_checkpoints_of_each_other(found: Any, name: str) -> None:
    expected, folder = found["saved"][name], found["folder"]
    [checkpoint] = (folder / name).iterdir()
    assert read_json(checkpoint / "MANIFEST.json")["format"] == 1
    assert {file.suffix for file in checkpoint.iterdir()} == {".safetensors", ".json"}
    alone, figures = resumed(name, folder)
    by_two = [process["resumed"][name] for process in found["processes"]]
    for brought_back in (alone, by_two[0][0]):
        assert brought_back.keys() == expected.keys()
        assert all(torch.equal(brought_back[key], expected[key]) for key in expected)
    for _, others in by_two:
        assert others == pytest.approx(figures, rel=1e-6)


@installed
def test_confirm_sees_a_mean_of_gradients(found: Any) -> None:
    for process in found["processes"]:
        in_force, means = process["confirm"]
        assert in_force == ""
        assert "the norm of all gradients" in means


@installed
def test_a_gradient_that_is_not_finite_shows_and_changes_no_weight(found: Any) -> None:
    assert [process["broken"] for process in found["processes"]] == [[float("inf"), True]] * 2


@installed
def test_a_step_that_a_guard_calls_bad_is_passed_over(found: Any) -> None:
    assert [process["passed over"] for process in found["processes"]] == [[True, True]] * 2


@installed
@pytest.mark.parametrize("setting", [{"stage": 3}, {"stage": 2, "replicas": 2}])
def test_what_deepspeed_cannot_do_is_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"set techniques\.sharding\.stage=2"):
        sharding.Sharding(4, engine="deepspeed", **setting)


def test_without_deepspeed_one_sentence_says_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "powertrain\[deepspeed\]"'):
        sharding.Sharding(2, 2, engine="deepspeed")
