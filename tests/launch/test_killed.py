"""A run of several processes, one of which is killed at any moment, ends with the bytes of one that was left alone. gloo.

A few moments are in the suite. `pytest -n0 -s tests/launch/test_killed.py --kills 30` adds 30 that are drawn at random, and
every call that the first two saves make.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from driver import TINY, Fault, run_cli, run_ranks
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.records.event_log import read_events
from powertrain.records.events import Resume, Start, Step

WORLD = 2
RUNS = {"data parallel": ["sample.tokens=0"], "sharded": ["techniques.sharding=on", "techniques.bf16=off", "sample.tokens=0"]}
# (run, rank that is killed, fault). The calls that a save makes: those of the first save and the beginning of the second
AT_CALLS: list[tuple[str, int, Fault]] = [
    ("data parallel", 1, ("step", 6)), ("data parallel", 0, ("step", 11)), ("data parallel", 0, ("save", 9)),
    ("data parallel", 0, ("save", 12)), ("sharded", 0, ("step", 5)), ("sharded", 1, ("save", 2)), ("sharded", 1, ("save", 5)),
    ("sharded", 0, ("save", 10)), ("sharded", 0, ("save", 15))]
DRAWN = 2                    # kills at random moments in the suite


def of_run(folder: Path) -> dict[str, bytes | list[tuple[int, float, float]]]:
    """What must be the same however often a run was killed: the model, the newest checkpoint and the steps."""
    newest, rejected = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert not rejected
    files = [folder / "model" / "model.safetensors", *sorted(newest.glob("*.safetensors"))]
    steps = [event for event in read_events(folder / "events.jsonl") if isinstance(event, Step)]
    return {"steps": [(step.step, step.loss, step.grad_norm) for step in steps],
            **{file.name: file.read_bytes() for file in files}}


class Unbroken:
    """Runs that nothing disturbed, each made once: what they end with, and how long they take."""

    def __init__(self, cache: Path, folder: Path, source: Path) -> None:
        self.cache, self.folder, self.source = cache, folder, source
        self.made: dict[str, tuple[dict[str, object], float]] = {}

    def words(self, run: str) -> list[str]:
        return ["train", f"data={self.source}", *TINY, *RUNS[run], "--output", "run", "--continue"]

    def __call__(self, run: str) -> tuple[dict[str, object], float]:
        if run not in self.made:
            folder = self.folder / run
            folder.mkdir()
            began_s = time.monotonic()
            ended = run_ranks(self.words(run), self.cache, folder, [None] * WORLD)
            assert [code for code, _ in ended] == [0] * WORLD, ended
            self.made[run] = {**of_run(folder / "run")}, time.monotonic() - began_s
        return self.made[run]


@pytest.fixture(scope="module")
def unbroken(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    folder = tmp_path_factory.mktemp("unbroken")
    source = folder / "text.txt"
    source.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    run_cli(["--help"], cache, folder)       # the fork server is there when the runs are timed
    return Unbroken(cache, folder, source)


def kill_and_continue(unbroken: Unbroken, folder: Path, run: str, rank: int, fault: Fault) -> Sequence[tuple[int, str]]:
    """Run once with the fault in one process, and once without; return how the processes of the first try ended."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    killed = run_ranks(unbroken.words(run), unbroken.cache, folder, [fault if one == rank else None for one in range(WORLD)])
    ended = run_ranks(unbroken.words(run), unbroken.cache, folder, [None] * WORLD)
    assert [code for code, _ in ended] == [0] * WORLD, (fault, ended)
    said = "".join(text for _, text in (*killed, *ended))
    assert "Traceback" not in said, f"{run}, process {rank}, {fault}:\n{said}"
    found, expected = of_run(folder / "run"), unbroken(run)[0]
    assert found.keys() == expected.keys()
    assert not [name for name in expected if found[name] != expected[name]], fault
    assert not list((folder / "run" / "checkpoints").glob(".tmp*"))
    return killed


@pytest.mark.parametrize(("run", "rank", "fault"), AT_CALLS, ids=str)
def test_a_run_killed_after_a_step_or_at_a_call_of_a_save(unbroken: Unbroken, tmp_path: Path, run: str, rank: int, fault: Fault
                                                          ) -> None:
    killed = kill_and_continue(unbroken, tmp_path, run, rank, fault)
    assert killed[rank][0] == -9, killed
    assert killed[1 - rank][0] in (76, -15), killed       # it sees that the other one is gone, or the agent ends it


def moments(unbroken: Unbroken, drawn: int, *, each_call: bool) -> Iterator[tuple[str, int, Fault]]:
    """Yield kills at random moments of the runs and, if asked, at every call that the first two saves make to the disk."""
    draw = random.Random(15)
    for _ in range(drawn):
        run, rank, share = draw.choice([*RUNS]), draw.randrange(WORLD), draw.random()
        yield run, rank, ("after", int(1000 * share * unbroken(run)[1]))
    if each_call:
        for run, rank, calls in (("data parallel", 0, 24), ("sharded", 0, 28), ("sharded", 1, 8)):
            yield from ((run, rank, ("save", call)) for call in range(1, calls + 1))


def test_a_run_killed_at_moments_that_are_drawn(unbroken: Unbroken, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    more = request.config.getoption("--kills")
    for run, rank, fault in moments(unbroken, DRAWN + more, each_call=more > 0):
        killed = kill_and_continue(unbroken, tmp_path, run, rank, fault)
        print(f"{run}, process {rank}, {fault}: {[code for code, _ in killed]}", flush=True)


def test_a_run_of_two_processes_goes_on_divided_among_three_and_then_alone_and_repeats_no_example(
        unbroken: Unbroken, tmp_path: Path) -> None:
    words, stop = unbroken.words("data parallel"), ("signal", 4)
    assert [code for code, _ in run_ranks(words, unbroken.cache, tmp_path, [None, stop])] == [75, 75]
    divided = ["train", "--resume", "run", "techniques.sharding.stage=3"]
    assert [code for code, _ in run_ranks(divided, unbroken.cache, tmp_path, [None, None, ("signal", 7)])] == [75] * 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*7/model*")] != ["model.safetensors"]
    code, _, err = run_cli(words, unbroken.cache, tmp_path)
    assert code == 0, err
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event.processes for event in events if isinstance(event, (Start, Resume))] == [2, 3, 1]
    resized, expected = of_run(tmp_path / "run")["steps"], unbroken("data parallel")[0]["steps"]
    assert [step for step, *_ in resized] == [step for step, *_ in expected]
    # the loss of a step is that of its examples: others, or the same ones twice, would have another one
    assert [loss for _, loss, _ in resized] == pytest.approx([loss for _, loss, _ in expected], rel=1e-4)


def test_memory_that_runs_out_in_the_exchange_of_one_process_is_one_sentence(unbroken: Unbroken, tmp_path: Path) -> None:
    """The others are in the midst of the exchange, so the step is not repeated; the checkpoints before it are whole."""
    first, second = run_ranks(unbroken.words("data parallel"), unbroken.cache, tmp_path, [None, ("exchange", 7)])
    assert (first[0], second[0]) in ((76, 1), (-15, 1)), (first, second)
    said = [line for line in second[1].splitlines() if line.startswith("powertrain: the optimizer's update of step ")]
    assert len(said) == 1, second[1]
    assert "Traceback" not in first[1] + second[1]
