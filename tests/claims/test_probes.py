"""Probes: each runs end to end on something tiny, and what it makes of its numbers is right. Nothing here is about speed."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY
from powertrain.claims.probes import PROBES, Context, Measured
from powertrain.claims.probes.files import blocked_s
from powertrain.claims.probes.kernels import attention_flops_share, eager_attention, exponents_of
from powertrain.claims.probes.loops import HABITS, spread
from powertrain.claims.probes.memory import SHAPES, known_facts
from powertrain.claims.probes.probe import Arms, apart, exactly, medians, open_training, ratio
from powertrain.claims.probes.runs import first_at, smoothed
from powertrain.data.table_tokenizers import ByteTokenizer
from powertrain.evidence.stats import OutOfTime, by_turns
from powertrain.evidence.worker import CannotRun
from powertrain.models.adapters.files import save_model
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.attention import math_attention
from powertrain.records import WrongUse, to_plain

FAR = float("inf")


@pytest.fixture
def context(cache: Path, tmp_path: Path) -> Context:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return Context(cache, FAR, None, folder)  # type: ignore[arg-type]


@pytest.fixture
def scratch_words(source: Path) -> list[str]:
    return [f"data={source}", *TINY, "data.validation_split=tail"]     # the same store for every seed


@pytest.fixture
def lora_words(tmp_path: Path) -> list[str]:
    """A run of a tiny llama on conversations of several lengths."""
    torch.manual_seed(0)
    config, _ = make_config("llama", vocabulary=257, layers=2, width=64, heads=2, context=128, end_of_text=256, tied_head=True)
    save_model(Decoder(config), tmp_path / "base", ByteTokenizer())
    rows = [{"question": f"what is {i}" + "?" * (i % 5), "answer": f"it is {i * i}"} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [f"model.path={tmp_path / 'base'}", f"data={tmp_path / 'data.jsonl'}", "train_batch_size=6", "max_steps=5",
            "techniques.threads=off"]


QUICK: list[tuple[str, dict[str, Any]]] = [
    ("attention_kernels", {"length": 16, "documents": 2, "heads": 2, "head_width": 16}),
    ("attention_memory", {"lengths": (16, 32)}),
    ("attention_share", {"steps": 1}),
    ("compression", {"steps": 1}),
    ("data_loading", {"a": 0, "b": 1, "also": (-1,), "steps": 2}),
    ("data_loading", {"a": 0, "b": -1, "steps": 2, "metric": "loading"}),
    ("dropped_examples", {"steps": 2}),
    ("epochs", {"steps": 3, "probe_steps": 2}),
    ("four_bit_bytes", {"model": "phi-3-mini"}),
    ("loop_habit", {"habit": "clipping", "a": 0, "b": 1.0, "steps": 2}),
    ("matmul", {"b": "bf16", "edge": 32}),
    ("optimizer_step", {"a": "loop", "b": "fused", "steps": 1}),
    ("saving", {"steps": 1}),
    ("target_loss", {"a": ["data.stride=16"], "b": ["data.stride=8"], "steps": 12}),
    ("unlike_runs", {"a": ["data.block=16"], "b": ["data.block=8"], "per": "examples", "steps": 2}),
    ("utilisation", {"steps": 2}),
]
WITHOUT_WORDS = {"attention_kernels", "attention_memory", "four_bit_bytes", "matmul"}


@pytest.mark.parametrize(("name", "settings"), QUICK, ids=[f"{name}-{i}" for i, (name, _) in enumerate(QUICK)])
def test_a_probe_runs_to_a_value(name: str, settings: dict[str, Any], context: Context, scratch_words: list[str]) -> None:
    words = {} if name in WITHOUT_WORDS else {"words": scratch_words}
    check_form(PROBES[name](context, **settings, **words))


def test_a_smaller_rank_takes_less_memory(context: Context, lora_words: list[str]) -> None:
    found = PROBES["step_memory"](context, words=lora_words, a=["lora.r=16"], b=["lora.r=4"])
    check_form(found)
    assert found.detail["adapter_ratio"] == 0.25
    assert found.value.median < 1


def test_examples_of_unequal_lengths_go_through_every_kind_of_loader(context: Context, lora_words: list[str]) -> None:
    check_form(PROBES["data_loading"](context, words=lora_words, a=0, b=1, also=(-1,), steps=1))


def check_form(found: Measured) -> None:
    value = found.value
    assert all(math.isfinite(end) for end in (value.low, value.median, value.high))
    assert value.low <= value.median <= value.high
    assert found.a
    assert found.b
    assert found.a != found.b
    assert found.unit
    json.dumps(to_plain(found), allow_nan=False)


def test_every_habit_of_a_loop_takes_the_steps_that_it_is_told_to(context: Context, scratch_words: list[str]) -> None:
    taken = apart(_steps_of_habits, scratch_words, context.cache)
    assert taken == {habit: [3, 3] for habit in HABITS}


def _steps_of_habits(words: list[str], cache: Path) -> dict[str, list[int]]:
    training, taken = open_training(words, cache, warm_up=1), {}
    for habit, form in HABITS.items():
        taken[habit] = []
        for setting in (0.0, 1.0):
            before = training.state.step
            form(training, 3, setting)
            taken[habit].append(training.state.step - before)
    return taken


def test_gradients_are_dropped_or_filled_with_zeros(context: Context, scratch_words: list[str]) -> None:
    assert apart(_gradients_left, scratch_words, context.cache) == {0.0: True, 1.0: False}


def _gradients_left(words: list[str], cache: Path) -> dict[float, bool]:
    training, left = open_training(words, cache, warm_up=1), {}
    for setting in (0.0, 1.0, 0.0):
        HABITS["dropping_gradients"](training, 2, setting)
        left[setting] = all(weight.grad is not None for weight in training.setup.model.parameters())
    return left


def test_housekeeping_collects_as_often_as_it_is_told_to(context: Context, scratch_words: list[str]) -> None:
    assert apart(_collections, scratch_words, context.cache) == [0, 6, 3]


def _collections(words: list[str], cache: Path) -> list[int]:
    gc.disable()                             # what the interpreter collects by itself
    training, counts = open_training(words, cache, warm_up=1), []
    for every in (0, 1, 2):
        before = gc.get_stats()[2]["collections"]
        HABITS["housekeeping"](training, 6, every)
        counts.append(gc.get_stats()[2]["collections"] - before)
    return counts


# ------------------------------------------------------------------------------------------------ turns


def test_arms_take_turns_a_b_b_a() -> None:
    called: list[str] = []

    def arm(name: str) -> Callable[[], float]:
        def call() -> float:
            called.append(name)
            return 1.0

        return call

    rounds = by_turns({name: arm(name) for name in "abc"}, FAR, repeats=5)
    assert "".join(called) == "abccbaabccbaabc"
    assert rounds == {name: [1.0] * 5 for name in "abc"}


def test_a_value_stays_with_its_arm_whichever_comes_first() -> None:
    rounds = by_turns({"a": lambda: 2.0, "b": lambda: 6.0}, FAR)
    assert ratio(rounds, "b", "a") == exactly(3.0)
    assert medians(rounds) == {"a": 2.0, "b": 6.0}


@pytest.fixture
def second_long_arm(monkeypatch: pytest.MonkeyPatch) -> Arms:
    """By a clock that stands at 0 and goes on for nothing else."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def arm() -> float:
        clock[0] += 1.0
        return 1.0

    return {"arm": arm}


def test_no_repeat_is_begun_after_the_deadline(second_long_arm: Arms) -> None:
    assert len(by_turns(second_long_arm, 6.5, repeats=100)["arm"]) == 7


@pytest.mark.parametrize(("deadline", "repeats"), [(-1.0, 0), (3.5, 4)])
def test_too_little_time_for_five_repeats_is_said(second_long_arm: Arms, deadline: float, repeats: int) -> None:
    with pytest.raises(OutOfTime, match=f"time for {repeats} repeats"):
        by_turns(second_long_arm, deadline)


# ------------------------------------------------------------------------------------------------ processes


def test_a_function_runs_in_another_process() -> None:
    assert apart(os.getpid) != os.getpid()


def test_a_wrong_use_in_another_process_stays_one() -> None:
    with pytest.raises(WrongUse, match="the probe's setting habit=none"):
        apart(_wrong)


def _wrong() -> None:
    raise WrongUse("the probe's setting habit=none is none of these")


def test_a_process_that_dies_is_said() -> None:
    with pytest.raises(CannotRun, match="ended with code 3"):
        apart(os._exit, 3)


# ------------------------------------------------------------------------------------------------ what numbers come to


def test_the_target_is_where_the_worse_of_two_ends() -> None:
    quick = [10.0] * 10 + [1.0] * 30         # smoothed: at 5.5 or less from the fifth step of the second part
    slow = [10.0] * 35 + [1.0] * 5
    one, other = first_at((quick, 10.0), (slow, 20.0))
    assert one == (15, 1.5)
    assert other == (40, 2.0)


def test_smoothing_averages_ten_steps() -> None:
    assert smoothed([float(i) for i in range(12)]) == [4.5, 5.5, 6.5]


def test_exponents_of_linear_and_quadratic_growth() -> None:
    assert exponents_of({256: 100, 512: 200, 1024: 400}) == [1.0, 1.0]
    assert exponents_of({1024: 1600, 256: 100, 512: 400}) == [2.0, 2.0]


def test_eager_attention_is_attention() -> None:
    q, k, v = (torch.randn(23, heads, 8) for heads in (4, 2, 2))
    arguments: dict[str, Any] = {"layer": 0, "dropout": 0.0, "window": None, "scale": 8 ** -0.5}
    torch.testing.assert_close(eager_attention(q, k, v, (5, 11, 5, 2), **arguments),
                               math_attention(q, k, v, (5, 11, 5, 2), **arguments))


def test_attention_is_little_of_phi_3s_arithmetic() -> None:
    phi3 = known_facts("phi-3-mini")
    assert attention_flops_share(phi3, [2048]) == pytest.approx(0.05, abs=0.01)     # causal: half of 10 %
    assert attention_flops_share(phi3, [256]) < 0.01


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("phi-3-mini", 3.82)])
def test_known_models_have_the_parameters_that_they_are_known_for(name: str, billions: float) -> None:
    assert known_facts(name).parameters / 1e9 == pytest.approx(billions, abs=0.005)


def test_an_unknown_model_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(WrongUse, match=", ".join(SHAPES)):
        known_facts("gpt-5")


def test_four_bits_leave_more_than_a_quarter_of_a_model(context: Context) -> None:
    detail = PROBES["four_bit_bytes"](context, model="llama-3.1-8b").detail
    assert detail["bytes"]["16 bits"] == pytest.approx(16.06e9, rel=0.01)
    assert detail["saved_share"] == pytest.approx(0.62, abs=0.02)


def test_a_tenth_of_the_saves_block_a_tenth() -> None:
    assert blocked_s(0.5, 50) == pytest.approx(10.0)
    assert blocked_s(0.5, 500) == pytest.approx(1.0)


def test_equal_norms_have_no_spread() -> None:
    assert spread([2.0, 2.0, 2.0]) == 0
    assert spread([1.0, 3.0]) == 0.5


def test_an_unknown_setting_is_refused_before_anything_starts(context: Context) -> None:
    with pytest.raises(WrongUse, match="habit=haste is none of housekeeping"):
        PROBES["loop_habit"](context, habit="haste", a=0, b=1, words=[])


def test_tf32_is_refused_where_there_is_none(context: Context) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(WrongUse, match="tensor cores"):
        PROBES["matmul"](context, edge=16)
