"""Classes of a step's work, from real profiles of a tiny model; and the bound that follows from them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY
from powertrain.evidence import profile as profiling
from powertrain.evidence import worker
from powertrain.evidence.profile import CLASSES, PRODUCTS, Profile, bound, from_shares, profile_steps
from powertrain.models.kernels.attention import bmm_attention, math_attention, ragged_attention, sdpa_attention
from powertrain.records.evidence import Arm, Window
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.whole_pass import WholePass
from powertrain.training.loop import new_state
from powertrain.training.setup import Setup

Make = Callable[..., Setup]


def shares(setup: Setup, *, marks_attention: bool = True) -> dict[str, float]:
    found = profile_steps(setup, new_state(setup, 0.1), 0, 1, 1.0, marks_attention=marks_attention)
    whole = sum(found.values())
    return {name: taken / whole for name, taken in found.items()}


@pytest.mark.parametrize("attention", [math_attention, bmm_attention, ragged_attention, sdpa_attention])
def test_every_class_of_a_step_is_found(make_setup: Make, attention: object) -> None:
    found = shares(replace(make_setup(), attention=attention))
    assert set(found) == set(CLASSES)
    assert all(found[name] > 0 for name in ("products", "attention", "loss", "elementwise", "optimizer"))
    assert found["data"] == found["copy"] == 0, "these are known by the clock"


def test_attention_is_known_by_its_kernels_where_it_cannot_be_marked(make_setup: Make) -> None:
    assert shares(replace(make_setup(), attention=bmm_attention), marks_attention=False)["attention"] > 0


@pytest.mark.parametrize(("operator", "multiplies"), [
    ("aten::addmm", True), ("aten::addmm_", True), ("aten::mm", True), ("aten::add_", False), ("aten::mul", False)])
def test_products_that_are_added_in_place_are_products(operator: str, multiplies: bool) -> None:
    assert bool(PRODUCTS.search(operator)) is multiplies


@pytest.mark.parametrize("whole", [False, True])
def test_kernels_that_hold_several_classes_say_which(make_setup: Make, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    def watched(events: Iterable[Any], *, on_gpu: bool) -> Mapping[str, float]:
        names.update(event.name for event in events)
        return seen(events, on_gpu=on_gpu)

    seen = profiling.shares
    monkeypatch.setattr(profiling, "shares", watched)
    setup = FusedBlocks("one_call").apply(replace(make_setup(), attention=ragged_attention))
    found = shares(WholePass().apply(setup) if whole else setup, marks_attention=False)
    assert all(found[name] > 0 for name in ("products", "attention", "loss", "optimizer"))
    assert "powertrain: elementwise" in names            # without a scope of its own it would be nobody's time


def test_what_the_head_and_its_gradient_cost_belongs_to_the_loss(make_setup: Make) -> None:
    """With a vocabulary of 20,000 the head does 50 times the work of a tiny model's block, in products like others.

    Other tests run beside this one and only add time: the least of three profiles is what a class takes.
    """
    setup = make_setup(vocabulary=20_000, layers=1)
    found = [profile_steps(setup, new_state(setup, 0.1), 0, 1, 1.0, marks_attention=True) for _ in range(3)]
    assert min(one["loss"] for one in found) > 2 * min(one["products"] for one in found)


def test_what_is_profiled_was_compiled_by_the_process_itself(source: Path, cache: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that a library makes are none to torch's profiler, and would be counted as elementwise."""
    profiled: list[Path | None] = []

    def watched(setup: Setup, *arguments: Any, **named: Any) -> Mapping[str, float]:
        profiled.append(setup.code)
        return profile_steps(setup, *arguments, **named)

    monkeypatch.setattr(worker, "profile_steps", watched)
    words = (f"data={source}", *TINY, "model.dropout=0", "techniques.fused_blocks=on")
    runner = worker.Runner(worker.Order(Arm("by hand", words), str(cache), str(tmp_path), str(tmp_path)))
    assert "fused_blocks" in runner.ready.techniques
    assert runner.setup.code is not None
    found = runner.profile(1)
    assert profiled == [None]
    assert found.classes["products"] > 0
    assert sum(found.classes.values()) == pytest.approx(found.step_s)
    torch._dynamo.reset()
    gc.unfreeze()


def test_the_seconds_of_the_classes_sum_to_the_step() -> None:
    window = Window(1, 2, 4.0, 10, 10, 0, {"data": 0.2, "copy": 0.1, "forward": 1.0, "backward": 2.0, "optimizer": 0.5})
    found = from_shares({"products": 3.0, "attention": 1.0, "loss": 0.0, "elementwise": 1.0, "optimizer": 9.0}, window)
    assert found.step_s == 2.0
    assert sum(found.classes.values()) == pytest.approx(2.0)
    assert found.classes["optimizer"] == pytest.approx(0.25), "the clock's, not the profiler's"
    assert found.classes["products"] == pytest.approx(3 * found.classes["attention"])


def profile(**seconds: float) -> Profile:
    return Profile(sum(seconds.values()), seconds)


def test_the_bound_is_amdahls() -> None:
    plain, full = profile(products=6.0, optimizer=3.0, elementwise=1.0), profile(products=2.0, optimizer=0.5, elementwise=1.0)
    assert bound(plain, full, frozenset({"optimizer"})) == pytest.approx((3.0 + 3.0) / 3.0)
    assert bound(plain, full, frozenset()) == 1.0
    assert bound(plain, full, frozenset(CLASSES)) == math.inf


@pytest.mark.parametrize("with_it_s", [0.0, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("without_s", [0.1, 0.5, 2.0])
def test_no_technique_does_more_than_its_bound_either_way(with_it_s: float, without_s: float) -> None:
    """Whatever the acted-on class takes with the technique and without it, up to what was seen."""
    plain, full = profile(optimizer=without_s, products=4.0), profile(optimizer=with_it_s, products=1.0)
    faster = (1.0 + without_s) / (1.0 + with_it_s)
    limit = bound(plain, full, frozenset({"optimizer"}))
    assert 1 / limit - 1e-9 <= faster <= limit + 1e-9
