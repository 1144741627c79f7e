"""Situations for checks: a tiny run, really prepared, on a machine and with data that a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observations import seen

from powertrain import planner
from powertrain.diagnosis.checks.machine import Machine, Situation
from powertrain.recipe import resolve_words
from powertrain.run.prepare import Prepared, prepare

MACHINE = Machine(load=0.0, threads=2, disk=Path("."), disk_free_bytes=1 << 40)
HARDWARE: Mapping[str, Any] = {"device": "cpu", "cores": 2, "instructions": ("avx2", "avx512f", "avx512_bf16"),
                               "peak_flops_per_s": {"fp32": 1e11, "bf16": 4e11}, "bandwidth_bytes_per_s": 1e10,
                               "free_memory_bytes": 8 << 30, "memory_bytes": 16 << 30, "speeds": {}}
# 10 examples a step, in one pass; 100 steps; nothing in it is worth a word
WELL = ["model.layers=2", "model.width=32", "model.heads=2", "data.tokenizer=char", "data.block=16", "train_batch_size=10",
        "max_steps=100", "eval_steps=50", "save_steps=50", "max_eval_samples=null", "sample.tokens=0"]


@pytest.fixture(scope="session")
def well_prepared(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Prepared]:
    """The run with further words, planned anew with what a test says of machine, data and model."""
    folder = tmp_path_factory.mktemp("diagnosis")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i % 7} of {i % 31} says {i % 3}\n" for i in range(2000)), encoding="utf-8")

    (folder / "tiny.yaml").write_text("name: tiny\n", encoding="utf-8")

    def make(*words: str, hardware: Mapping[str, Any] | None = None, data: Mapping[str, Any] | None = None,
             model: Mapping[str, Any] | None = None) -> Prepared:
        resolved = resolve_words([str(folder / "tiny.yaml"), f"data={text}", *WELL, *words])
        found = prepare(resolved, cache, lambda said: None)
        facts = replace(found.facts, hardware=replace(found.facts.hardware, **{**HARDWARE, **(hardware or {})}),
                        data=replace(found.facts.data, **(data or {})), model=replace(found.facts.model, **(model or {})))
        return replace(found, facts=facts, plan=planner.make_plan(facts, found.recipe, found.total_steps))

    return make


@pytest.fixture
def situation(well_prepared: Callable[..., Prepared]) -> Callable[..., Situation]:
    def make(*words: str, machine: Mapping[str, Any] | None = None, observed: Mapping[str, Any] | None = None,
             refused: tuple[str, ...] = (), **facts: Any) -> Situation:
        watched = None if observed is None else seen(**observed)
        return Situation(well_prepared(*words, **facts), replace(MACHINE, **(machine or {})), refused, watched)

    return make
