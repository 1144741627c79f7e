"""Two agents of torchrun, as on two machines: one machine is lost, and the run goes on with the other one. gloo."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from driver import TINY
from powertrain.launch.group import WITHIN
from powertrain.launch.on_ray import free_port
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Resume, Start, Step

WITHIN_S = 120
AGAIN_WITHIN_S = 60          # of the loss of a machine: 3 keep-alives of 1 s, and a start
# of the rendezvous: how long it waits for more machines, and how often a machine says that it is there
SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"


def training(agent: psutil.Process) -> list[psutil.Process]:
    return [child for child in agent.children(recursive=True) if "train" in child.cmdline()]


@pytest.fixture
def agents(source: Path, cache: Path, tmp_path: Path) -> Iterator[list[psutil.Popen]]:
    """Two agents, each with one process of the same run. The first one keeps the store in which agents meet."""
    words = [f"data={source}", *TINY, "max_steps=400", "save_steps=10", "eval_steps=400", "sample.tokens=0", "--output", "run",
             "--continue"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=run"]
    started = []
    for name in ("first", "second"):
        conf = f"--rdzv-conf={SOON},is_host={'true' if name == 'first' else 'false'}"
        command = [*agent, conf, "-m", "powertrain", "train", *words]
        with open(tmp_path / name, "w") as log:
            started.append(psutil.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env={
                **os.environ, "POWERTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1", WITHIN: "20",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))
    yield started
    for process in started:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()
        process.wait()


def wait_until(done: object, tmp_path: Path) -> None:
    until = time.monotonic() + WITHIN_S
    while not done():  # type: ignore[operator]
        assert time.monotonic() < until, "".join((tmp_path / name).read_text() for name in ("first", "second"))
        time.sleep(0.05)


def test_a_machine_that_is_lost_leaves_the_run_to_the_others(agents: list[psutil.Popen], tmp_path: Path) -> None:
    run = tmp_path / "run"
    wait_until(lambda: any((run / "checkpoints").glob("step-*")), tmp_path)
    left, lost = agents
    for process in [lost, *training(lost)]:  # as a machine that loses its power
        process.kill()
    began_s = time.monotonic()
    wait_until(lambda: '"event": "resume"' in (run / "events.jsonl").read_text(), tmp_path)
    again_s = time.monotonic() - began_s
    assert again_s < AGAIN_WITHIN_S
    assert left.wait(WITHIN_S) == 0
    events = read_events(run / "events.jsonl")
    assert [event.processes for event in events if isinstance(event, (Start, Resume))] == [2, 1]
    assert [event.step for event in events if isinstance(event, Step)] == list(range(1, 401))
    assert isinstance(end := events[-1], End)
    assert end.reason == "finished"
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)]
