"""The cache of tuned plans: for which runs one holds, and that a run uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powertrain.planner import Tuned
from powertrain.recipe import Recipe, resolve_words
from powertrain.records import Facts
from powertrain.records.evidence import Interval
from powertrain.run.learned import forget_tuned, keep_tuned, read_tuned, tuned_file, tuning_key
from powertrain.run.prepare import prepare

TUNED = Tuned({"fused_adamw": "off", "loader": {"workers": 2}}, Interval(1.12, 1.08, 1.15), "2026-11-21", "a-study",
              {"loader": 10})


def pinned(**techniques: object) -> Recipe:
    return Recipe.model_validate({"techniques": techniques})


def test_what_is_kept_is_read_again_and_can_be_forgotten(facts: Facts, tmp_path: Path) -> None:
    assert read_tuned(tmp_path, facts, Recipe()) is None
    keep_tuned(tmp_path, facts, Recipe(), TUNED)
    assert read_tuned(tmp_path, facts, Recipe()) == TUNED
    forget_tuned(tmp_path, facts, Recipe())
    forget_tuned(tmp_path, facts, Recipe())
    assert read_tuned(tmp_path, facts, Recipe()) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pins": 1}', '{"pins": {}, "speed": {"median": 1}, "date": "1"}'])
def test_a_file_that_cannot_be_read_is_no_tuning(facts: Facts, tmp_path: Path, text: str) -> None:
    file = tuned_file(tmp_path, facts, Recipe())
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    assert read_tuned(tmp_path, facts, Recipe()) is None


CHANGES: dict[str, tuple[Callable[[Facts], Facts], dict[str, Any]]] = {
    "machine": (lambda facts: replace(facts, hardware=replace(facts.hardware, fingerprint="another")), {}),
    "torch": (lambda facts: replace(facts, software=replace(facts.software, versions={"torch": "3.0"})), {}),
    "model": (lambda facts: replace(facts, model=replace(facts.model, width=64)), {}),
    "block": (lambda facts: replace(facts, data=replace(facts.data, block=24)), {}),
    "batch": (lambda facts: replace(facts, data=replace(facts.data, train_batch_size=28)), {}),
    "pins": (lambda facts: facts, {"techniques": {"bf16": "off"}}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_kind_of_run_has_another_key(facts: Facts, what: str) -> None:
    change, values = CHANGES[what]
    assert tuning_key(change(facts), Recipe.model_validate(values)) != tuning_key(facts, Recipe())


def test_other_data_of_the_same_shape_and_another_base_have_the_same_key(facts: Facts) -> None:
    ragged = replace(facts, data=replace(facts.data, kind="conversation", block=200, max_length=900,
                                         length_quantiles={"min": 10, "p50": 180, "max": 900}))
    similar = replace(facts, model=replace(facts.model, path="/elsewhere"), data=replace(
        ragged.data, digest="1" * 64, source="other", documents=7, examples=99, block=203, max_length=910,
        length_quantiles={"min": 10, "p50": 181, "max": 910}))
    longer = replace(ragged, data=replace(ragged.data, max_length=2000))
    assert tuning_key(similar, Recipe()) == tuning_key(ragged, Recipe(learning_rate=1e-4))
    assert tuning_key(longer, Recipe()) != tuning_key(ragged, Recipe())


def test_a_run_uses_what_was_tuned(tiny: list[str], cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache / "hardware", tmp_path / "hardware")         # the peaks; what is tuned here is of this test alone
    before = prepare(resolve_words(tiny), tmp_path, lambda text: None)
    keep_tuned(tmp_path, before.facts, before.recipe, TUNED)
    plan = prepare(resolve_words(tiny), tmp_path, lambda text: None).plan
    found = {step.technique.name: step for step in plan.steps}
    assert "fused_adamw" not in found
    assert found["loader"].because.startswith("measured on 2026-11-21: 1.12 times as fast")
    other = prepare(resolve_words([*tiny, "train_batch_size=7"]), tmp_path, lambda text: None).plan
    assert "fused_adamw" in {step.technique.name for step in other.steps}
