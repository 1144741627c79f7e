"""Saves beside the training: what a run does while one is written, and where disk or memory is short."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from powertrain.records.checkpoints import newest_checkpoint
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import CheckpointFailed, End, Event, Saved, SavedAtOnce, SaveInterval, SaveWaits, Step
from powertrain.run import saving
from powertrain.run.saving import InFlight, Saves, finish
from powertrain.training.ranks import ALONE

Cli = Callable[..., tuple[int, str, str]]
AnEvent = TypeVar("AnEvent", bound=Event)


def happened(run: Path, kind: type[AnEvent]) -> list[AnEvent]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("file", [1, 2, 5, 8])           # four files a checkpoint
def test_killed_while_a_checkpoint_is_written_beside_the_training(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path, file: int) -> None:
    assert cli(*words, fault=("writing", file))[0] == -9
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-000004"] * (file > 4)
    assert len(list(checkpoints.glob(".tmp-*"))) == 1
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert weights(tmp_path / "run") == weights(unbroken)
    assert not list(checkpoints.glob(".tmp-*"))


def test_a_slow_disk_lets_the_training_go_on_with_one_save_in_flight(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, out, err = cli(*words, fault=("slow", 200))
    assert code == 0, err
    saved = happened(tmp_path / "run", Saved)
    assert [(event.step, event.beside) for event in saved] == [(4, True), (8, True), (11, False)]
    assert all(event.written_s is not None and event.written_s > 0.6 for event in saved)
    # step 5 was done before the checkpoint of step 4 was, and the save of step 8 waited for it
    everything = read_all_events(tmp_path / "run" / "events.jsonl")
    steps = [event.step for event in everything[:everything.index(saved[0])] if isinstance(event, Step)]
    assert max(steps) >= 6
    assert "Checkpoints" in out
    assert weights(tmp_path / "run") == weights(unbroken)


def test_a_disk_without_room_lets_saves_wait_and_names_what_might_go(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "recipe.yaml").touch()
    (other / "checkpoints" / "large").write_bytes(bytes(3 << 20))
    code, _, err = cli(*words, fault=("room", 4))        # one before the first step, and three after steps 4, 5 and 6
    assert code == 0, err
    waits = happened(tmp_path / "run", SaveWaits)
    assert [(event.step, event.free_bytes) for event in waits] == [(4, 300), (5, 300), (6, 300)]
    assert waits[0].frees[str(other / "checkpoints")] == 3 << 20
    assert "300 bytes are free" in err
    saved = happened(tmp_path / "run", Saved)
    assert [event.step for event in saved] == [7, 8, 11]
    assert 0.9 * saved[0].bytes < waits[0].needed_bytes <= saved[0].bytes        # besides the headers and the manifest
    assert weights(tmp_path / "run") == weights(unbroken)


def test_on_disk_full_may_stop_the_run(cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, _, err = cli(*words, "on_disk_full=stop", fault=("room", 2))
    assert code == 1, err
    assert "on_disk_full=stop ends the run here" in err
    assert "Traceback" not in err
    assert cli("train", "--resume", "run", "on_disk_full=wait")[0] == 0
    assert weights(tmp_path / "run") == weights(unbroken)


def test_without_memory_for_a_copy_the_training_waits_and_that_is_said_once(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, _, err = cli(*words, fault=("copy", 90))
    assert code == 0, err
    (said,) = happened(tmp_path / "run", SavedAtOnce)
    assert said.free_bytes <= 90 < said.needed_bytes
    assert [(event.step, event.beside) for event in happened(tmp_path / "run", Saved)] == [(4, False), (8, False), (11, False)]
    assert weights(tmp_path / "run") == weights(unbroken)


def test_a_refused_write_is_told_with_its_kind(cli: Cli, words: list[str], tmp_path: Path) -> None:
    assert cli(*words, fault=("full", 4))[0] == 3
    failed = happened(tmp_path / "run", CheckpointFailed)
    assert {event.code for event in failed} == {"EFBIG"}
    assert "ulimit -f" in failed[0].sentence
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-000004"


def test_save_steps_auto_chooses_the_interval_from_the_first_save_and_keeps_it(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    auto = [word for word in words if not word.startswith("save_steps")]
    code, _, err = cli(*auto, "save_steps=auto", "save_every_s=0.001", fault=("signal", 9))
    assert code == 75, err
    (found,) = happened(tmp_path / "run", SaveInterval)
    assert found.step == 1
    assert found.steps == max(1, round(max(0.001, found.saving_s / 0.01) / found.step_s))
    assert cli("train", "--resume", "run")[0] == 0
    assert happened(tmp_path / "run", SaveInterval) == [found]
    assert weights(tmp_path / "run") == weights(unbroken)


def test_a_run_that_fails_finishes_the_save_in_flight(cli: Cli, words: list[str], tmp_path: Path) -> None:
    code, _, err = cli(*words, "learning_rate=1e30", "save_steps=1", "logging_steps=1", fault=("slow", 200))
    assert code == 1, err
    written = [event for event in read_all_events(tmp_path / "run" / "events.jsonl") if isinstance(event, (Saved, End))]
    assert [type(event) for event in written] == [Saved, End]
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-000001"
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


def test_the_seconds_in_which_a_gpu_copies_count_as_waited_for(tmp_path: Path) -> None:
    (tmp_path / "step-000004").mkdir()
    told: list[Any] = []
    save: Any = SimpleNamespace(finish=lambda: tmp_path / "step-000004", copying_s=700.0, step=4, pinned_bytes=600)
    part: Any = SimpleNamespace(ranks=ALONE, folder=SimpleNamespace(checkpoints=tmp_path),
                                state=SimpleNamespace(evaluations={}),
                                prepared=SimpleNamespace(recipe=SimpleNamespace(save_total_limit=3)),
                                emit=lambda event, durable=False: told.append(event))
    saves = Saves(0.0, in_flight=InFlight(save, time.perf_counter(), 50.0, beside=True), every=4, pinned_bytes=500)
    finish(part, saves)
    assert told[0].seconds == pytest.approx(750, abs=5)
    assert saves.pinned_bytes == 600


def test_pinned_memory_that_torch_keeps_is_there_for_the_next_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "usable_memory", lambda: (0, 500, ""))
    monkeypatch.setattr(saving, "checkpoint_bytes", lambda prepared: 1000)
    monkeypatch.setattr(saving, "slabs_for", lambda state: SimpleNamespace(slab_bytes=100))
    part: Any = SimpleNamespace(setup=SimpleNamespace(device=torch.device("cuda")), prepared=None,
                                state=SimpleNamespace(step=4))
    assert saving._shortage(part, Saves(0.0, pinned_bytes=600)) is None          # 1,100 needed, 500 free and 600 kept
    assert saving._shortage(part, Saves(0.0, pinned_bytes=599)) is not None
