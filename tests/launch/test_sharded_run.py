"""A run whose weights two processes divide: from the command to the model, through a killed process. gloo."""

from __future__ import annotations

import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from driver import TINY, run_cli, run_ranks, start
from powertrain.records.event_log import read_events
from powertrain.records.events import Resume, Step
from powertrain.records.json_files import read_json

WITHIN_S = 120
STEPS = 40
RUN = [f"max_steps={STEPS}", "save_steps=5", "eval_steps=20", "techniques.bf16=off"]


def losses(run: Path) -> dict[int, float]:
    """Step -> its loss; of a step that was taken again, the last time."""
    return {event.step: event.loss for event in read_events(run / "events.jsonl") if isinstance(event, Step)}


def kill_one(command: BaseProcess, run: Path, err: Path) -> None:
    """Kill the second of the processes that train, once a checkpoint is there."""
    until = time.monotonic() + WITHIN_S
    while not any((run / "checkpoints").glob("step-*")):
        assert command.exitcode is None, err.read_text()
        assert time.monotonic() < until
        time.sleep(0.02)
    found = [child for child in psutil.Process(command.pid).children(recursive=True) if str(run) in child.cmdline()]
    next(child for child in found if child.environ()["RANK"] == "1").kill()


@pytest.mark.parametrize(("technique", "others"), [
    ("sharding", []), ("pipeline_parallel", ["model.tied_head=false", "model.dropout=0"])])
def test_a_run_that_divides_its_weights_survives_a_killed_process_and_goes_on_alone(cache: Path, source: Path, tmp_path: Path,
                                                                                    technique: str, others: list[str]) -> None:
    words = ["train", f"data={source}", *TINY, *RUN, *others, f"techniques.{technique}=on"]
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    ended = run_ranks([*words, "--output", str(unbroken)], cache, tmp_path, [None, None])
    assert [code for code, _ in ended] == [0, 0], ended
    command, _, err = start([*words, "--processes", "2", "--output", str(killed)], cache, tmp_path)
    kill_one(command, killed, err)
    command.join(WITHIN_S)
    assert command.exitcode == 0, err.read_text()
    assert "Traceback" not in err.read_text()
    assert any(isinstance(event, Resume) for event in read_events(killed / "events.jsonl"))
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (killed, unbroken))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert losses(killed) == losses(unbroken)

    newest = max((killed / "checkpoints").glob("step-*"))
    assert read_json(newest / "MANIFEST.json")["shards"] == 2
    for path in (killed / "model", newest):  # the last checkpoint is lost, and with it the last steps and the model
        shutil.rmtree(path)
    code, _, said = run_cli(["train", "--resume", str(killed)], cache, tmp_path)
    assert code == 0, said
    assert losses(killed)[STEPS] == pytest.approx(losses(unbroken)[STEPS], rel=1e-3)
    model, other = (sorted(file.name for file in (run / "model").iterdir()) for run in (killed, unbroken))
    assert model == other
