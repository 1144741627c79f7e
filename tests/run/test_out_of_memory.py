"""A run under a real limit on its memory: what does not fit is halved, at the same batch, and learned all the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import run_cli
from powertrain import planner
from powertrain.recipe import Recipe
from powertrain.records import DataFacts, Facts
from powertrain.records.event_log import read_events
from powertrain.records.events import OutOfMemory, Step
from powertrain.run.fits import largest_pass, with_smaller_passes
from powertrain.run.prepare import Prepared
from powertrain.run.session import clear_step
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.packing import Packing
from powertrain.training.loop import backward, new_state, update
from powertrain.training.memory import is_out_of_memory
from powertrain.training.setup import Setup

Cli = Callable[..., tuple[int, str, str]]
MODEL = ["model.family=gpt2", "model.layers=2", "model.width=64", "model.heads=2", "data.tokenizer=char", "data.block=64",
         "learning_rate=1e-3", "save_steps=0", "eval_steps=0", "logging_steps=1", "sample.tokens=0", "sample.prompt=",
         "max_eval_samples=8", "techniques.threads=off", "techniques.bf16=off"]


@pytest.fixture(scope="module")
def text(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made after the machine was measured in a process of its own, whose large buffers leave room behind."""
    run_cli(["facts"], cache, tmp_path_factory.mktemp("measured"))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(4000)), encoding="utf-8")
    return path


def losses(run: Path) -> list[float]:
    return [event.loss for event in read_events(run / "events.jsonl") if isinstance(event, Step)]


def micro_batch_of(run: Path) -> int | None:
    steps = json.loads((run / "plan.json").read_text())["steps"]
    return next((step["settings"]["examples"] for step in steps if step["technique"] == "micro_batch"), None)


def test_a_step_that_does_not_fit_is_taken_again_in_smaller_passes_and_learns_the_same(
        cli: Cli, text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    words = ["train", f"data={text}", *MODEL, "train_batch_size=512", "max_steps=2"]
    code, _, err = cli(*words, "techniques.micro_batch=off", "save_steps=1", "--output", "run", fault=("memory", 60))
    assert code == 0, err
    assert "step 1 ran out of memory" in err
    run = tmp_path / "run"
    examples = micro_batch_of(run)
    assert examples in (256, 128, 64)
    plain = tmp_path_factory.mktemp("plain")
    code, _, err = run_cli([*words, f"techniques.micro_batch.examples={examples}", "--output", "run"], cache, plain)
    assert code == 0, err
    assert losses(run) == pytest.approx(losses(plain / "run"), rel=1e-5)
    warning = next(event for event in read_events(run / "events.jsonl") if isinstance(event, OutOfMemory))
    assert warning.step == 0
    assert 0 < warning.after_tokens < warning.before_tokens
    assert (warning.train_batch_size, bool(warning.said)) == (512, True)
    before = (run / "plan.json").read_bytes()
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert (run / "plan.json").read_bytes() == before


def test_a_run_of_a_given_time_is_timed_in_passes_that_fit(cli: Cli, text: Path, tmp_path: Path) -> None:
    code, _, err = cli("train", f"data={text}", *MODEL, "train_batch_size=512", "train_time_s=1", "techniques.micro_batch=off",
                       "--output", "run", fault=("memory", 60))
    assert code == 0, err
    assert micro_batch_of(tmp_path / "run") in (256, 128, 64)


def test_one_example_that_does_not_fit_ends_the_run_with_the_cure(cli: Cli, text: Path) -> None:
    # so deep that no room which earlier work left in the heap is enough for it
    deep = [*(word for word in MODEL if "model.layers" not in word), "model.layers=12"]
    words = ["train", f"data={text}", *deep, "train_batch_size=1", "data.block=16384", "max_steps=1",
             "techniques.fused_blocks=off", "--output", "run"]
    code, _, err = cli(*words, fault=("memory", 10))
    assert code == 1, err
    assert "and its largest pass, of 16,384 tokens, cannot be halved; what would help: " in err
    assert re.search(r"what would help: \S+ saves [\d.]+ [MG]iB; ", err)
    assert not re.search("which is enough|not enough alone", err)
    assert "Traceback" not in err


@pytest.mark.parametrize(("error", "expected"), [
    (MemoryError(), True), (torch.OutOfMemoryError("CUDA out of memory"), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"), True),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"), True),
    (RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB, max allowed: 18.1 GB)"), True),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"), True),
    (RuntimeError("CUDA driver error: out of memory"), True), (RuntimeError("HIP error: out of memory"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
    (RuntimeError("Triton Error [CUDA]: out of memory"), True), (RuntimeError("Invalid buffer size: 13.56 GiB"), True),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
    (RuntimeError("CUDA error: device-side assert triggered"), False),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
    (RuntimeError("std::bad_alloc"), True), (RuntimeError("shapes cannot be multiplied"), False),
    (ValueError("not enough memory"), False)])
def test_errors_of_memory_are_told_from_others(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def prepared_for(setup: Setup, facts: Facts, *techniques: Any) -> Prepared:
    plan = planner.make_plan(facts, Recipe(), 10)
    kept = tuple(step for step in plan.steps if "passes" not in step.technique.slots)
    steps = tuple(replace(plan.steps[0], technique=technique) for technique in techniques)
    return Prepared(facts, None, replace(plan, steps=kept + steps), 10)     # type: ignore[arg-type]


def halved(prepared: Prepared, setup: Setup) -> tuple[Prepared, Setup]:
    found = with_smaller_passes(prepared, setup, 0)
    assert found is not None
    return found


def test_where_nothing_splits_the_batch_half_of_it_becomes_the_micro_batch(setup: Setup, facts: Facts) -> None:
    prepared, smaller = halved(prepared_for(setup, facts), setup)
    assert (setup.micro_batch, smaller.micro_batch) == (14, 7)
    found = next(step for step in prepared.plan.steps if step.technique.name == "micro_batch")
    assert found.technique == MicroBatch(7)
    assert found.because == "passes of 168 tokens ran out of memory at step 1"
    assert [step.technique.name for step in prepared.plan.steps] == [
        name for name in planner.BY_NAME if name in {step.technique.name for step in prepared.plan.steps}]
    assert "micro_batch" not in {refusal.technique for refusal in prepared.plan.refused}
    assert planner.from_json(planner.to_json(prepared.plan)).steps == prepared.plan.steps


def test_a_micro_batch_is_halved_down_to_one_example(setup: Setup, facts: Facts) -> None:
    prepared, seen = prepared_for(setup, facts, MicroBatch(14)), [14]
    while seen[-1] > 1:
        prepared, setup = halved(prepared, setup)
        seen.append(setup.micro_batch)
    assert seen == [14, 7, 4, 2, 1]
    assert with_smaller_passes(prepared, setup, 0) is None


def test_packed_passes_are_halved_until_they_are_smaller(setup: Setup, facts: Facts) -> None:
    """Of 4,096 tokens, of which a step of 168 uses few, to 128, which are two passes of 84, filled up."""
    data: DataFacts = replace(facts.data, kind="conversation", length_quantiles={"min": 12, "p50": 12, "max": 12})
    packing = Packing(4096, 8192, 256)
    packed = packing.apply(setup)
    prepared, smaller = halved(prepared_for(packed, replace(facts, data=data), packing), packed)
    assert (largest_pass(packed, 0), largest_pass(smaller, 0)) == (256, 128)
    assert [step.technique for step in prepared.plan.steps if "passes" in step.technique.slots] == [
        Packing(128, 8192, 128)]
    prepared, smaller = halved(prepared, smaller)
    assert largest_pass(smaller, 0) <= 64
    assert with_smaller_passes(prepared, smaller, 0) is None


def test_a_failed_pass_leaves_nothing_behind(setup: Setup) -> None:
    state = new_state(setup, 0.1)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    batches = setup.prepare(0)
    backward(setup, state.scaler, batches, batches[0].trained_tokens)
    assert any(parameter.grad is not None for parameter in setup.model.parameters())
    clear_step(state)
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, setup.model.parameters(), strict=True))


def test_an_update_that_breaks_off_is_known_to_have_begun(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    state, batches = new_state(setup, 0.1), setup.prepare(0)
    backward(setup, state.scaler, batches, batches[0].trained_tokens)
    update(state, max_grad_norm=1.0)
    assert not state.updating
    monkeypatch.setattr(state.optimizer, "step", out_of_memory)
    with pytest.raises(MemoryError):
        update(state, max_grad_norm=1.0)
    assert state.updating
