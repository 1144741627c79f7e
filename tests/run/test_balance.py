"""How processes share the steps of a run: a slow one is named each time, equal ones never. Real processes, gloo."""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY, run_processes
from powertrain.recipe import resolve
from powertrain.records.event_log import read_events
from powertrain.records.events import Event, Start, Step, Straggler
from powertrain.records.timeline import sharing
from powertrain.run.balance import OWN, STRETCHES, OwnStep, SharedStep, StragglerWatch, shares_of, slowness
from powertrain.run.part import Part, new_run
from powertrain.run.prepare import prepare
from powertrain.run.session import run
from powertrain.training.loop import StepResult
from powertrain.training.ranks import joined

WORLD, LATE_S = 2, 0.05
SLOWED: dict[str, int | None] = {"equal": None, "first": 0, "second": 1}         # case -> the slow process
# of slow processes, three stretches; equal processes have unequal passes (5, 5 and 4 examples for two), until they are stopped
WORDS = {"equal": ["max_steps=4000"], "first": ["max_steps=66", "techniques.micro_batch.examples=7"],
         "second": ["max_steps=66", "techniques.micro_batch.examples=7"]}
EQUAL_S = 5.0


# ------------------------------------------------------------------------------------------------ made-up times


def own(tokens: int, seconds: float, waits_s: float = 0.0) -> OwnStep:
    return OwnStep(tokens, {"data": 0.1 * seconds, "copy": 0.0, "forward": 0.3 * seconds, "backward": 0.6 * seconds,
                            "communication": waits_s, "optimizer": 0.01})


def named(steps: Sequence[SharedStep]) -> list[Straggler]:
    watch = StragglerWatch()
    return [found for step in steps for found in watch.take(step)]


def test_the_process_that_waits_least_waits_for_the_exchange_alone() -> None:
    shares = shares_of([own(300, 0.08, 0.01), own(100, 0.05, 0.04)])
    assert shares == {"communication_share": pytest.approx(0.1), "waiting_share": pytest.approx(0.15),
                      "token_imbalance": pytest.approx(1.5)}
    assert shares_of([own(300, 0.08)]) == {}


def test_a_process_is_slow_by_its_time_and_by_its_time_for_a_token() -> None:
    assert slowness([own(100, 0.1), own(100, 0.1), own(100, 0.15)]) == pytest.approx([1.0, 1.0, 1.5])
    assert max(slowness([own(300, 0.3), own(100, 0.1), own(100, 0.1)])) == pytest.approx(1.0)        # more tokens
    assert max(slowness([own(300, 0.3), own(300, 0.3), own(20, 0.06)])) <= 1.0   # few tokens: dear, and nobody waits
    assert max(slowness([own(100, 0.1), own(0, 0.0), own(0, 0.0)])) == pytest.approx(1.0)    # one pass for three processes


def test_a_slow_process_is_named_once_until_it_has_recovered() -> None:
    slow, even = [own(100, 0.1), own(100, 0.1), own(100, 0.15)], [own(100, 0.1)] * 3
    (found,) = named([slow] * 200)
    assert (found.rank, found.part) == (2, "backward")
    assert (found.own_s, found.usual_s) == (pytest.approx(0.15), pytest.approx(0.1))
    assert [one.rank for one in named([*[slow] * 40, *[even] * 10, *[slow] * 40])] == [2, 2]


def test_fewer_stretches_in_a_row_name_nobody() -> None:
    slow, even = [own(100, 0.1), own(100, 0.1), own(100, 0.15)], [own(100, 0.1)] * 3
    assert not named([*[slow] * 10 * (STRETCHES - 1), *[even] * 10] * 20)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_equal_processes_that_lose_their_cores_for_a_while_are_never_named(world: int) -> None:
    """Each process loses its core for bursts of up to a second, in which its steps take twice to four times as long."""
    draw = random.Random(world)
    until, steps, now = [0.0] * world, list[SharedStep](), 0.0
    for _ in range(8_000):
        for rank in range(world):
            if now > until[rank] and draw.random() < 0.02:
                until[rank] = now + draw.uniform(0.0, 1.0)
        steps.append([own(draw.randint(80, 120), draw.uniform(0.01, 0.011) * (draw.uniform(2, 4) if now < until[rank] else 1))
                      for rank in range(world)])
        now += max(one.own_s for one in steps[-1])
    assert any(all(slowness(step)[0] > 1.2 for step in three) for three in zip(steps, steps[1:], steps[2:], strict=False)), \
        "single steps would have named an equal process"
    assert not named(steps)


# ------------------------------------------------------------------------------------------------ processes


def _late(part: Part) -> None:
    """Make each backward pass of this process end later."""
    run_pass = part.setup.run_pass

    def late(*arguments: Any) -> Any:
        found = run_pass(*arguments)
        time.sleep(LATE_S)
        arguments[-1]("backward")
        return found

    part.setup = replace(part.setup, run_pass=late)


def _stopped(part: Part) -> None:
    """Stop the run after some seconds."""
    steps, until = part.steps(), time.monotonic() + EQUAL_S

    def until_then() -> Iterator[StepResult]:
        for result in steps:
            if time.monotonic() > until:
                part.interrupt.requested = "SIGTERM"
            yield result

    part.steps = until_then  # type: ignore[method-assign]


def _process(rank: int, port: int, folder: str, cache: str, source: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    ranks = joined()
    for case, slow in SLOWED.items():
        words = [f"data={source}", *TINY, "sample.tokens=0", "save_steps=0", "eval_steps=0", *WORDS[case],
                 f"output_dir={folder}/{case}"]
        prepared = prepare(resolve(None, words), Path(cache), lambda text: None)
        with new_run(prepared, lambda event: None, lambda *_: "", ranks) as part:
            if slow is None:
                _stopped(part)
            elif rank == slow:
                _late(part)
            run(part)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, list[Event]]:
    """Case -> the events of its run."""
    folder = tmp_path_factory.mktemp("balance")
    source = folder / "text.txt"
    source.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    prepare(resolve(None, [f"data={source}", *TINY]), cache, lambda text: None)      # cached before both look for the tokens
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_processes(_process, WORLD, port, str(folder), str(cache), str(source))
    return {case: read_events(folder / case / "events.jsonl") for case in SLOWED}


@pytest.mark.parametrize("case", SLOWED)
def test_a_slow_process_is_named_each_time_and_equal_ones_never(runs: dict[str, list[Event]], case: str) -> None:
    found = [event for event in runs[case] if isinstance(event, Straggler)]
    assert [(event.rank, event.part) for event in found] == [] if SLOWED[case] is None else [(SLOWED[case], "backward")]
    for event in found:
        assert event.own_s > event.usual_s + LATE_S / 5      # the median of two lies between them
        assert event.host == socket.gethostname()
        assert f"process {SLOWED[case]} on {event.host} holds the others up" in event.sentence


def test_steps_tell_communication_waiting_and_balance(runs: dict[str, list[Event]]) -> None:
    for case, events in runs.items():
        steps = [event for event in events if isinstance(event, Step)]
        assert [event.processes for event in events if isinstance(event, Start)] == [WORLD]
        for step in steps:
            assert {*OWN, "communication", "optimizer"} == {*step.parts}
            assert sum(step.parts.values()) == pytest.approx(step.seconds, abs=1e-5)
            assert step.communication_share is not None
            assert 0 < step.communication_share < 1
            assert step.token_imbalance == pytest.approx(2 * 9 / 14 if case == "equal" else 1.0)
        shares = sharing(steps)
        assert shares is not None
        assert shares.waiting_share > 0.1 or case == "equal"
    waits = {case: sum(step.parts["communication"] for step in itertools.islice(
        (event for event in events if isinstance(event, Step)), 60)) for case, events in runs.items()}
    assert waits["second"] > 60 * LATE_S / 2 > waits["first"]    # the first process waits for the second, not for itself
