"""A run whose weights two processes divide: from the command to the model, through a killed process. gloo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from driver import TINY, run_cli
from powertrain.records.event_log import read_events
from powertrain.records.events import Resume, Step
from powertrain.records.json_files import read_json

WITHIN_S = 120
STEPS = 40
RUN = [f"max_steps={STEPS}", "save_steps=5", "eval_steps=20", "techniques.bf16=off"]


def losses(run: Path) -> dict[int, float]:
    """Step -> its loss; of a step that was taken again, the last time."""
    return {event.step: event.loss for event in read_events(run / "events.jsonl") if isinstance(event, Step)}


def start(words: list[str], run: Path, cache: Path) -> subprocess.Popen[str]:
    with open(run.with_suffix(".err"), "w") as err:
        return subprocess.Popen([sys.executable, "-m", "powertrain", "train", *words, "--processes", "2", "--output", str(run)],
                                text=True, stderr=err, stdout=subprocess.DEVNULL,
                                env={**os.environ, "POWERTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1"})


def kill_one(command: subprocess.Popen[str], run: Path) -> None:
    """Kill the second of the processes that train, once a checkpoint is there."""
    until = time.monotonic() + WITHIN_S
    while not any((run / "checkpoints").glob("step-*")):
        assert command.poll() is None, run.with_suffix(".err").read_text()
        assert time.monotonic() < until
        time.sleep(0.02)
    found = [child for child in psutil.Process(command.pid).children(recursive=True) if str(run) in child.cmdline()]
    next(child for child in found if child.environ()["RANK"] == "1").kill()


@pytest.mark.parametrize(("technique", "others"), [
    ("sharding", []), ("pipeline_parallel", ["model.tied_head=false", "model.dropout=0"])])
def test_a_run_that_divides_its_weights_survives_a_killed_process_and_goes_on_alone(cache: Path, source: Path, tmp_path: Path,
                                                                                    technique: str, others: list[str]) -> None:
    words = [f"data={source}", *TINY, *RUN, *others]
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    for run in (unbroken, killed):
        command = start([*words, f"techniques.{technique}=on"], run, cache)
        if run is killed:
            kill_one(command, run)
        assert command.wait(WITHIN_S) == 0, run.with_suffix(".err").read_text()
    assert "Traceback" not in killed.with_suffix(".err").read_text()
    assert any(isinstance(event, Resume) for event in read_events(killed / "events.jsonl"))
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (killed, unbroken))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert losses(killed) == losses(unbroken)

    newest = max((killed / "checkpoints").glob("step-*"))
    assert read_json(newest / "MANIFEST.json")["shards"] == 2
    for path in (killed / "model", newest):  # the last checkpoint is lost, and with it the last steps and the model
        shutil.rmtree(path)
    code, _, err = run_cli(["train", "--resume", str(killed)], cache, tmp_path)
    assert code == 0, err
    assert losses(killed)[STEPS] == pytest.approx(losses(unbroken)[STEPS], rel=1e-3)
    model, other = (sorted(file.name for file in (run / "model").iterdir()) for run in (killed, unbroken))
    assert model == other
