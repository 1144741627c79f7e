"""Two processes that divide a model come to one verdict on a step, where one of them alone sees what is bad."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_pipeline
import test_sharded
import test_tensor_parallel
import torch

from driver import run_processes
from powertrain.techniques import fused_adamw, packing
from powertrain.training.guard import Guard
from powertrain.training.loop import new_state, train
from powertrain.training.ranks import Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.sharded import own_part

FUSED = (packing.Packing(tokens=80), fused_adamw.FusedAdamW())
WAYS: dict[str, Any] = {
    "zero 3": test_sharded.Case(), "zero 3, fused": test_sharded.Case(techniques=FUSED),
    "zero 1, fused": test_sharded.Case(stage=1, techniques=FUSED), "tensor parallel": test_tensor_parallel.Case(),
    "tensor parallel, fused": test_tensor_parallel.Case(techniques=FUSED), "stages": test_pipeline.Case(),
    "stages, fused": test_pipeline.Case(techniques=FUSED)}


def verdicts(way: str, ranks: Ranks) -> dict[str, Any]:
    """Three steps; in the second one, one element of the second process's gradients is infinite."""
    setup = WAYS[way].setup(ranks)
    state = replace(new_state(setup, 0.1), guard=Guard.on(setup.device, spikes=True))
    assert state.guard is not None
    gather = state.optimizer.gather

    def poisoned() -> None:
        gather()
        if state.step == 1 and ranks.rank == 1:
            divided = [weight for weight in setup.model.parameters() if hasattr(weight, "part") or "parallel" not in way]
            gradient = max((own_part(weight.grad) for weight in divided if weight.grad is not None), key=torch.Tensor.numel)
            gradient.view(-1)[0] = math.inf

    state.optimizer.gather = poisoned  # type: ignore[method-assign]
    steps, held = train(setup, state, Schedule("constant", 1e-2, 3), 1.0), list[list[torch.Tensor]]()
    bad = []
    for step in steps:
        bad.append(bool(step.bad))
        held.append([own_part(weight.detach()).clone() for weight in setup.model.parameters()])
    same = [all(map(torch.equal, one, other)) for one, other in itertools.pairwise(held)]
    return {"bad": bad, "same": same, "finite": all(bool(weight.isfinite().all()) for weight in held[-1]),
            "window": state.guard.window[:, -2:]}  # type: ignore[index]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    torch.save({way: verdicts(way, joined()) for way in WAYS}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("guards")
    run_processes(_process, 2, str(folder))
    return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_both_pass_over_the_step_in_which_one_has_a_gradient_that_is_not_finite(found: list[dict[str, Any]], way: str) -> None:
    for process in found:
        assert process[way]["bad"] == [False, True, False]
        assert process[way]["same"] == [True, False]     # the weights after steps 1 and 2, and after 2 and 3
        assert process[way]["finite"]
    assert torch.equal(found[0][way]["window"], found[1][way]["window"])
