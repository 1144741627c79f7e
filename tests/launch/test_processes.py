"""A run that several processes of this machine share: it learns what one process learns, whatever happens to them. gloo."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess as Command
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from driver import TINY, run_cli, run_ranks, start
from powertrain.launch.group import WITHIN
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, Resume, Saved, Start, Step
from powertrain.records.json_files import read_json

LONG = ["max_steps=160", "save_steps=20", "eval_steps=40", "sample.tokens=0"]        # long enough to be disturbed
WITHIN_S = 120               # on a machine that other tests use too
ANSWERS_WITHIN_S = 10        # of a process, in place of minutes
AGAIN_WITHIN_S = 60          # of a kill, the run goes on: the others end at once, and all start again


def losses(run: Path) -> dict[int, float]:
    """Step -> its loss; of a step that was taken again, the last time."""
    return {event.step: event.loss for event in read_events(run / "events.jsonl") if isinstance(event, Step)}


def ended(command: Command) -> int | None:
    """The command's exit code; None for one that does not end."""
    command.join(WITHIN_S)
    return command.exitcode


def said(folder: Path) -> str:
    return (folder / ".stderr").read_text()


def resumed(events: Path) -> int:
    return sum('"event": "resume"' in line for line in events.read_text().splitlines())


def trainers(command: Command) -> list[psutil.Process]:
    """The processes that share the run, in the order in which they were started."""
    found = [child for child in psutil.Process(command.pid).children(recursive=True) if "--output" in child.cmdline()
             or "--resume" in child.cmdline()]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def wait_until(what: str, done: object, command: Command, folder: Path) -> None:
    until = time.monotonic() + WITHIN_S
    while not done():  # type: ignore[operator]
        if time.monotonic() > until or command.exitcode is not None:
            raise AssertionError(f"{what} did not happen:\n{said(folder)}")
        time.sleep(0.02)


@pytest.fixture(scope="module")
def words(text: Path) -> list[str]:
    return [f"data={text}", *TINY, *LONG]


@pytest.fixture(scope="module")
def unbroken(words: list[str], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    found = run_ranks(["train", *words, "--output", "run"], cache, folder, [None, None])
    assert [code for code, _ in found] == [0, 0], found
    return folder / "run"


def test_two_processes_learn_what_one_learns(words: list[str], unbroken: Path, cache: Path, tmp_path: Path) -> None:
    code, _, err = run_cli(["train", *words, "--output", "run"], cache, tmp_path)
    assert code == 0, err
    alone, together = losses(tmp_path / "run"), losses(unbroken)
    assert list(together) == list(alone)
    # dropout too; AdamW makes whole steps of what is rounding in one place, so only the first steps agree to rounding
    assert [together[step] for step in range(1, 13)] == pytest.approx([alone[step] for step in range(1, 13)], rel=1e-4)
    assert together[160] == pytest.approx(alone[160], rel=1e-2)
    events = read_events(unbroken / "events.jsonl")
    assert [event.processes for event in events if isinstance(event, Start)] == [2]
    assert [step["technique"] for step in read_json(unbroken / "plan.json")["steps"]][-1] == "data_parallel"
    assert sum(isinstance(event, Evaluated) for event in events) == 4


@pytest.fixture
def running(words: list[str], cache: Path, tmp_path: Path) -> Iterator[Command]:
    """A run of two processes that has saved its first checkpoint."""
    command, _, _ = start(["train", *words, "--processes", "2", "--output", "run"], cache, tmp_path,
                          place={WITHIN: f"{ANSWERS_WITHIN_S}"})
    try:
        wait_until("a checkpoint", lambda: any((tmp_path / "run" / "checkpoints").glob("step-*")), command, tmp_path)
        yield command
    finally:
        if command.exitcode is None:
            for process in [*trainers(command), psutil.Process(command.pid)]:
                process.kill()
            command.join()


def test_a_run_whose_processes_are_killed_and_frozen_ends_with_the_bytes_of_one_that_was_left_alone(
        running: Command, unbroken: Path, tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    trainers(running)[1].kill()
    began_s = time.monotonic()
    wait_until("a second start", lambda: resumed(events) == 1, running, tmp_path)
    again_s = time.monotonic() - began_s
    trainers(running)[0].send_signal(signal.SIGSTOP)
    assert ended(running) == 0, said(tmp_path)
    assert again_s < AGAIN_WITHIN_S
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
    assert resumed(events) == 2
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "run", unbroken))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert losses(tmp_path / "run") == losses(unbroken)
    assert not (unbroken / "stacks").exists()
    stacks = [(tmp_path / "run" / "stacks" / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert all("most recent call first" in text and "/powertrain/" in text for text in stacks)
    err = said(tmp_path)
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if "start again" in line] == [
        "... process 1 was ended by SIGKILL: all processes start again, at the newest whole checkpoint",
        "... a process did not answer; run/stacks says what the processes were doing: all processes start again, at the newest "
        "whole checkpoint"]


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_another_number_of_processes(
        running: Command, unbroken: Path, cache: Path, tmp_path: Path) -> None:
    running.terminate()
    assert ended(running) == 75, said(tmp_path)
    assert "death signal" not in said(tmp_path)          # torch's agent has its own words
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert isinstance(end, End)
    assert (end.reason, end.signal) == ("stopped", "SIGTERM")
    code, _, err = run_cli(["train", "--resume", "run"], cache, tmp_path)
    assert code == 0, err
    assert [event.processes for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Resume)] == [1]
    assert losses(tmp_path / "run")[end.step + 1] == pytest.approx(losses(unbroken)[end.step + 1], rel=1e-5)


def test_no_process_trains_on_when_the_one_that_started_it_is_killed(running: Command, tmp_path: Path) -> None:
    left = trainers(running)
    running.kill()
    running.join()
    _, alive = psutil.wait_procs(left, WITHIN_S)
    assert not alive
    end = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert isinstance(end, End)
    assert end.reason == "stopped"


def test_a_signal_to_one_process_stops_all_and_saves_once(running: Command, tmp_path: Path) -> None:
    trainers(running)[0].send_signal(signal.SIGTERM)
    assert ended(running) == 75, said(tmp_path)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert isinstance(end := events[-1], End)
    assert (end.reason, end.signal) == ("stopped", "SIGTERM")
    assert [event.step for event in events if isinstance(event, Saved)][-1:] == [end.step]


@pytest.mark.parametrize(("asked", "says"), [
    (["--processes", "4096"], "4096 processes are more than the "),
    (["--gpus", "2"], "use --processes 2 for processes on the cores of a CPU"),
    (["--gpus", "2", "--processes", "2"], "leave one out"),
    (["--processes", "2", "train_batch_size=1"], "train_batch_size=1 cannot be shared by 2 processes"),
    (["--processes", "2", "learning_rat=1"], "learning_rate")])
def test_what_cannot_be_shared_is_one_sentence(words: list[str], cache: Path, tmp_path: Path, asked: list[str], says: str
                                               ) -> None:
    code, out, err = run_cli(["train", *words, *asked, "--output", "run"], cache, tmp_path)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err
