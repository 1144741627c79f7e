"""Every technique beside what any run may need: several passes a step, going on after a stop, checkpointing, export.

With the contract's evaluation that is a table, technique by feature; a technique that is added to CATALOGUE is a row of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kinds_of_runs import Case
from test_contract import as_needed, here

from powertrain.models.adapters.attached import has_adapters, merged, plain_state
from powertrain.models.adapters.files import load_adapter, save_adapter
from powertrain.models.decoder import Decoder, run_plainly
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.planner import make_plan
from powertrain.records import Plan, Proposal, WrongUse
from powertrain.records.checkpoints import FILES
from powertrain.techniques import CATALOGUE, Technique
from powertrain.techniques.base import Exactness
from powertrain.techniques.packing import Packing
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, apply_plan, backward, evaluate, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

# relative, of all gradients together
TOLERANCE = {Exactness.BITWISE: 1e-5, Exactness.ROUNDING: 1e-5, Exactness.LOSSY: 0.1}
IN_BF16 = 0.05                               # each product is rounded to 2^-9
STEPS = 4
pytestmark = pytest.mark.usefixtures("restored_process")


def in_force(case: Case, step: Proposal, micro_batch: int | None = None) -> Setup:
    setup = case.make_setup()
    return apply_plan(setup if micro_batch is None else replace(setup, micro_batch=micro_batch), Plan((step,), ()))


def gradients_of(setup: Setup) -> torch.Tensor:
    """Of the first step's mean loss, all weights' one behind the other."""
    passes = setup.prepare(0)
    backward(setup, new_state(setup, 0.1).scaler, passes, sum(batch.trained_tokens for batch in passes))
    return torch.cat([parameter.grad.flatten() for parameter in setup.model.parameters() if parameter.grad is not None])


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def go_on(setup: Setup, state: State, to: int) -> None:
    for _ in train(setup, state, Schedule("constant", 1e-2, to), 1.0):
        pass


def end_of(setup: Setup, state: State, folder: Path) -> list[bytes]:
    """The files of the last step's checkpoint."""
    go_on(setup, state, STEPS)
    return [(save_checkpoint(folder, state) / file).read_bytes() for file in FILES]


def tolerance_of(technique: type[Technique], setup: Setup) -> float:
    return IN_BF16 if setup.precision.compute_dtype is torch.bfloat16 else TOLERANCE[technique.exactness]


def plan_beside_checkpointing(case: Case, technique: type[Technique]) -> Plan | str:
    """The plan of a run that asks for both, or the sentence that says why it cannot be."""
    name = technique.name
    precision = {} if name in ("bf16", "frozen_base") else {"bf16": "off"}
    pins = as_needed(technique, case.recipe).techniques | precision | {name: "on", "activation_checkpointing": "on"}
    try:
        return make_plan(case.facts, case.recipe.model_copy(update={"techniques": pins}), 100)
    except WrongUse as error:
        return str(error)


@pytest.mark.parametrize("technique", CATALOGUE, ids=lambda technique: technique.name)
class TestFeatures:
    def test_a_step_of_several_passes_has_the_gradients_of_one(self, technique: type[Technique],
                                                               cases: Mapping[str, Case]) -> None:
        case, step = here(technique, cases)
        if isinstance(step.technique, Packing):
            step = replace(step, technique=replace(step.technique, tokens=60, multiple=1))
        setup = in_force(case, step, micro_batch=5)
        assert len(setup.prepare(0)) > 1
        expected = gradients_of(replace(case.make_setup(), micro_batch=14))
        assert apart(gradients_of(setup), expected) < tolerance_of(technique, setup)

    def test_a_stopped_run_goes_on_to_the_same_bytes(self, technique: type[Technique], cases: Mapping[str, Case],
                                                     tmp_path: Path) -> None:
        case, step = here(technique, cases)
        whole = in_force(case, step, micro_batch=5)
        expected = end_of(whole, new_state(whole, 0.1), tmp_path / "whole")
        stopped = in_force(case, step, micro_batch=5)
        state = new_state(stopped, 0.1)
        go_on(stopped, state, STEPS // 2)
        kept = save_checkpoint(tmp_path / "stopped", state)
        resumed = in_force(case, step, micro_batch=5)
        torch.manual_seed(99)                # whatever chance there is in a new process
        state = new_state(resumed, 0.1)
        load_checkpoint(kept, state)
        assert end_of(resumed, state, tmp_path / "resumed") == expected

    def test_it_is_beside_checkpointing_or_says_why_it_cannot_be(self, technique: type[Technique],
                                                                 cases: Mapping[str, Case]) -> None:
        case, _ = here(technique, cases)
        plan = plan_beside_checkpointing(case, technique)
        if isinstance(plan, str):
            assert "activation_checkpointing" in plan
            return
        assert {technique.name, "activation_checkpointing"} <= {step.technique.name for step in plan.steps}
        setup = apply_plan(case.make_setup(), plan)
        assert apart(gradients_of(setup), gradients_of(case.make_setup())) < tolerance_of(technique, setup)

    def test_what_was_trained_is_exported(self, technique: type[Technique], cases: Mapping[str, Case], tmp_path: Path) -> None:
        case, step = here(technique, cases)
        setup = in_force(case, step)
        untrained = evaluate(setup, setup.examples, tokens_per_byte=None).loss
        go_on(setup, new_state(setup, 0.1), STEPS)
        trained = evaluate(setup, setup.examples, tokens_per_byte=None).loss
        plain = (case.make_without or case.make_setup)()
        for exported in exports_of(setup.model, plain.model, tmp_path):
            found = evaluate(replace(plain, model=exported, run_block=run_plainly), plain.examples, tokens_per_byte=None).loss
            # a base of 4 or 8 bits is merged as it was published; bf16 is what it was evaluated in
            coarse = technique.exactness is Exactness.LOSSY or setup.precision.compute_dtype is not torch.float32
            assert abs(found - trained) < (0.05 if coarse else 1e-4) * abs(untrained - trained) + 1e-5 * trained


def exports_of(model: torch.nn.Module, plain: torch.nn.Module, folder: Path) -> Iterator[Decoder]:
    """The folder of a whole model opened again; of adapters, those opened on the base, and merged into it."""
    assert isinstance(model, Decoder)
    assert isinstance(plain, Decoder)
    if not has_adapters(model):
        save_folder(model, folder / "model")
        yield load_folder(folder / "model")
        return
    save_adapter(model, folder / "adapter", base="")
    base = Decoder(model.config)
    base.load_state_dict(plain_state(plain))
    load_adapter(base, folder / "adapter")
    yield base
    yield merged(base)
