"""Cures tried: once really, in two processes; else with comparisons that are recorded, so that no clock decides a test."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from observations import GOOD, reckoned, seen

from driver import TINY
from powertrain.diagnosis import remedies as trials
from powertrain.diagnosis.observed import Observed, Remedy
from powertrain.diagnosis.remedies import expected_s, try_remedies
from powertrain.evidence.clock import CannotRun, Pace
from powertrain.records.evidence import FASTER, INVALID, Arm, Comparison, Interval

PADDED = seen(step_s=(0.2,) * 20, parts={"forward": 0.06, "backward": 0.13, "optimizer": 0.01}, padding_tokens=2048.0)
PACKING = reckoned("padding", "techniques.packing=on", 0.1)
LOADER = reckoned("data", "techniques.loader=on", 0.9)
FOREVER = math.inf


class RecordedArena:
    """Answers with what a test says, and remembers what was asked."""

    answers: Sequence[float | str | None]
    asked: list[tuple[Arm, Arm]]

    def __init__(self, cache: Path, *, preload: Sequence[str] = ()) -> None:
        self.cache, self.preload = cache, preload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compare(self, a: Arm, b: Arm, pace: Pace, *, deadline: float) -> tuple[Comparison, None, None]:
        answer = self.answers[len(self.asked)]
        self.asked.append((a, b))
        if isinstance(answer, str):
            raise CannotRun(answer)
        speed = None if answer is None else Interval(answer, answer - 0.1, answer + 0.1)
        verdict, because = (INVALID, "the loss is not finite") if answer is None else (FASTER, "")
        return Comparison(a.name, b.name, speed, 5, verdict, because, (1.0, 1.0), (1, 1)), None, None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(answers: Sequence[float | str | None], observed: Observed, remedies: Sequence[Remedy], *,
            deadline: float = FOREVER) -> tuple[tuple[Remedy, ...], list[tuple[Arm, Arm]], list[str]]:
        said: list[str] = []
        monkeypatch.setattr(RecordedArena, "answers", answers, raising=False)
        monkeypatch.setattr(RecordedArena, "asked", [], raising=False)
        monkeypatch.setattr(trials, "Arena", RecordedArena)
        tried = try_remedies(["tiny"], observed, remedies, cache=Path("."), deadline=deadline, start_s=1.0, say=said.append)
        return tried, RecordedArena.asked, said

    return run


def test_a_cure_is_the_recipe_with_its_words_against_the_recipe(recorded: Callable[..., Any]) -> None:
    (tried,), ((before, after),), _ = recorded([1.8], PADDED, [PACKING])
    assert (before.words, after.words) == (("tiny",), ("tiny", "techniques.packing=on"))
    assert tried.speed == 1.8
    assert tried.basis == "measured: steps 1.80 times as fast with it (1.70 to 1.90, 5 pairs of windows)"


def test_what_promises_most_is_tried_first_and_the_order_of_the_remedies_stays(recorded: Callable[..., Any]) -> None:
    waiting = replace(PADDED, parts={**PADDED.parts, "data": 0.15})
    tried, asked, _ = recorded([1.7, 1.2], waiting, [LOADER, PACKING])
    assert [after.name for _, after in asked] == ["techniques.packing=on", "techniques.loader=on"]
    assert [(remedy.against, remedy.speed) for remedy in tried] == [("data", 1.2), ("padding", 1.7)]


def test_what_cannot_give_anything_is_not_tried(recorded: Callable[..., Any]) -> None:
    tried, asked, _ = recorded([], GOOD, [reckoned("padding", "techniques.packing=on", 0.0)])
    assert (asked, tried[0].speed) == ([], None)


def test_what_compiles_now_and_then_is_left_to_arithmetic(recorded: Callable[..., Any]) -> None:
    compiling = seen(recompilations=20, recompile_s=100.0)
    tried, asked, _ = recorded([], compiling, [reckoned("recompilation", "techniques.torch_compile=off", 0.0)])
    assert (asked, tried[0].speed, tried[0].kept) == ([], None, 0.0)


def test_without_time_left_nothing_is_tried_and_that_is_said(recorded: Callable[..., Any]) -> None:
    tried, asked, said = recorded([], PADDED, [PACKING], deadline=time.monotonic())
    assert (asked, tried[0]) == ([], PACKING)
    assert said == ["no time left to try techniques.packing=on; use a larger --budget"]


@pytest.mark.parametrize(("answer", "basis"), [("out of memory", "measured: the run fails (out of memory)"),
                                               (None, "measured: the loss is not finite")])
def test_a_cure_that_does_not_run_gives_nothing(recorded: Callable[..., Any], answer: str | None, basis: str) -> None:
    (tried,), _, _ = recorded([answer], PADDED, [PACKING])
    assert (tried.speed, tried.basis) == (1.0, basis)


def test_a_trial_takes_two_starts_and_its_windows() -> None:
    assert expected_s(seen(step_s=(3.0,) * 5), start_s=10.0) == pytest.approx(20.0 + 3.0 * trials.WINDOWS)


def test_a_cure_is_really_run_beside_the_recipe(source: Path, cache: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "PACE", Pace(window_s=0.001, pairs=5, most_pairs=5, warm_up_s=0.05))
    words = (f"data={source}", *(word for word in TINY if "micro_batch" not in word), "techniques.micro_batch.examples=1",
             "techniques.bf16=off")
    remedy = reckoned("host overhead", "techniques.micro_batch.examples=14", 0.1)
    overhead = seen(step_s=(0.4,) * 20, parts={"forward": 0.2, "backward": 0.2})
    tried, = try_remedies(words, overhead, [remedy], cache=cache, deadline=FOREVER, start_s=1.0, say=lambda said: None)
    assert tried.speed is not None
    assert tried.speed > 0
    assert tried.basis.startswith("measured: steps")
    assert list(tmp_path.iterdir()) == [tmp_path / "text.txt"]
