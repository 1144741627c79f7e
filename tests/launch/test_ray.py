"""A run whose processes Ray starts on this machine: the driver that `powertrain launch ray` writes, with two CPU workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from powertrain.records.event_log import read_events
from powertrain.records.events import End, Resume, Start, Step

Cli = Callable[..., tuple[int, str, str]]
WITHIN_S = 300               # Ray takes most of it to start itself, and to start the workers again


def processes_of(run: Path) -> list[psutil.Process]:
    """The processes of the run, in the order of ranks."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = process.info["cmdline"] or []
        if str(run) in words and "train" in words and "RANK" in (process.info["environ"] or {}):
            found.append((int(process.info["environ"]["RANK"]), process))
    return [process for _, process in sorted(found, key=lambda one: one[0])]


@pytest.fixture
def driver(cli: Cli, tiny: list[str], cache: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The written driver, at work."""
    words = [*tiny, "max_steps=400", "save_steps=20", "eval_steps=400", "sample.tokens=0", f"output_dir={tmp_path / 'run'}"]
    code, _, err = cli("launch", "ray", *words, "--nodes", "2", "--gpus", "0", "--cores", "1", "--output", "driver.py")
    assert code == 0, err
    with open(tmp_path / "log", "w") as log:
        started = subprocess.Popen([sys.executable, "driver.py"], cwd=tmp_path, stdout=log, stderr=log, text=True, env={
            **os.environ, "POWERTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": f"/tmp/ray-{os.getpid()}"})
    yield started
    for process in [*psutil.Process(started.pid).children(recursive=True), started] if started.poll() is None else []:
        process.kill()
    started.wait()


def test_a_run_on_ray_whose_process_is_killed_starts_again_and_finishes(driver: subprocess.Popen[str], tmp_path: Path) -> None:
    run, until = tmp_path / "run", time.monotonic() + WITHIN_S
    while not any((run / "checkpoints").glob("step-*")):
        assert driver.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    first = processes_of(run)
    assert len(first) == 2
    first[1].kill()
    assert driver.wait(WITHIN_S) == 0, (tmp_path / "log").read_text()
    events = read_events(run / "events.jsonl")
    assert [event.processes for event in events if isinstance(event, (Start, Resume))] == [2, 2]
    assert max(event.step for event in events if isinstance(event, Step)) == 400
    assert isinstance(end := events[-1], End)
    assert end.reason == "finished"
    assert (run / "model" / "model.safetensors").is_file()
    assert not processes_of(run)
