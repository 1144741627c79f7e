"""The probe of a real tiny run: what it fills in, what it leaves behind, when it ends. No time of it is judged."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from powertrain.diagnosis.probe import LEAST_STEPS, STEPS, Probed, pass_seconds, probe, recomputing_is_needed
from powertrain.records import RunFailed
from powertrain.run.prepare import Prepared, build_setup

Make = Callable[..., Prepared]
# what would change this process for the tests after it
CALM = ("techniques.threads=off", "techniques.allocator=off", "techniques.bf16=off", "techniques.torch_compile=off",
        "techniques.fused_blocks=off", "techniques.attention_kernel=off")
ENOUGH_S = 100.0             # that the steps never take


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def probed(well_prepared: Make, work: Path) -> Probed:
    return probe(well_prepared(*CALM, "techniques.micro_batch.examples=5", "eval_steps=7", "save_steps=0"), ENOUGH_S)


def test_what_holds_a_run_back_can_be_reckoned_from_what_was_seen(probed: Probed) -> None:
    seen = probed.observed
    assert len(seen.step_s) == STEPS
    assert all(taken > 0 for taken in seen.step_s)
    assert set(seen.parts) == {"data", "copy", "forward", "backward", "optimizer"}
    assert sum(seen.parts.values()) == pytest.approx(sum(seen.step_s) / STEPS)
    assert (seen.steps, seen.passes, seen.real_tokens, seen.padding_tokens) == (100, 2.0, 160.0, 0.0)
    assert seen.step_slots == (160.0,) * STEPS
    assert (seen.dtype, seen.threads, seen.cores, seen.split_over) == ("fp32", torch.get_num_threads(), 2, 1)
    assert seen.flops is not None
    assert seen.flops > 0
    assert (seen.recompilations, seen.recompile_s) == (0, 0.0)


def test_what_a_run_does_between_steps_is_done_once_as_often_as_the_recipe_says(probed: Probed) -> None:
    between = probed.observed
    assert between.evaluation is not None
    assert between.checkpoint is not None
    assert (between.evaluation.key, between.evaluation.every) == ("eval_steps", 7)
    assert (between.checkpoint.every, set(between.between) & {"checkpointing"}) == (0, set())
    assert between.evaluation.seconds > 0
    assert between.checkpoint.seconds > 0
    assert probed.last_s >= between.checkpoint.seconds


def test_the_losses_are_those_of_the_run(probed: Probed) -> None:
    assert len(probed.losses) == STEPS
    assert all(math.isfinite(loss) for loss in probed.losses)
    assert probed.losses[-1] < probed.losses[0]


def test_nothing_of_it_stays_on_the_disk(probed: Probed, work: Path) -> None:
    assert probed.observed.checkpoint is not None              # one was written
    assert list(work.iterdir()) == []


def test_without_time_it_watches_the_least_there_is_to_see(well_prepared: Make, work: Path) -> None:
    assert len(probe(well_prepared(*CALM), seconds=0.0).observed.step_s) == LEAST_STEPS


def test_of_a_run_of_few_steps_all_but_the_first_are_seen(well_prepared: Make, work: Path) -> None:
    assert len(probe(well_prepared(*CALM, "max_steps=4"), ENOUGH_S).observed.step_s) == 2
    assert len(probe(well_prepared(*CALM, "max_steps=2"), ENOUGH_S).observed.step_s) == 1
    assert len(probe(well_prepared(*CALM, "max_steps=1"), ENOUGH_S).observed.step_s) == 1


def test_a_loss_that_is_not_finite_fails_with_what_would_help(well_prepared: Make, work: Path) -> None:
    with pytest.raises(RunFailed, match=r"not finite within the first .* lower learning_rate"):
        probe(well_prepared(*CALM, "learning_rate=1e30", "max_grad_norm=0", "warmup_steps=0"), ENOUGH_S)


def test_one_example_has_no_cost_of_its_own_to_tell_from_that_of_a_pass(well_prepared: Make) -> None:
    assert pass_seconds(build_setup(well_prepared(*CALM, "train_batch_size=1"))) is None
    several_s = pass_seconds(build_setup(well_prepared(*CALM, "techniques.micro_batch.examples=2")))
    assert several_s is not None
    assert several_s >= 0


def test_recomputing_is_needed_where_the_memory_would_not_hold_the_step_without_it(well_prepared: Make) -> None:
    words = (*CALM, "techniques.activation_checkpointing=on")
    assert not recomputing_is_needed(well_prepared(*words))
    assert recomputing_is_needed(well_prepared(*words, hardware={"free_memory_bytes": 1 << 20}))
