"""The queue of uploads on the disk: a damaged waiting.json is told again by the files beside it, and nothing is dropped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_sets import made_checkpoint, wait_with

from powertrain.mirror import waiting
from powertrain.mirror.process import upload_all
from powertrain.mirror.shelf import Shelf
from powertrain.mirror.store import Store
from powertrain.mirror.waiting import ABOUT, FOLDER, MATERIAL, MATERIAL_LIST, SETTINGS, Settings, all_waiting, settings_of
from powertrain.records import WrongUse
from powertrain.records.event_log import read_all_events
from powertrain.records.events import Uploaded, UploadFailed, WaitingRebuilt


def to_folder(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


def changed(**fields: Any) -> Callable[[Path], None]:
    return lambda file: write(json.dumps({**json.loads(file.read_text()), **fields}).encode())(file)


def write(content: bytes) -> Callable[[Path], None]:
    def written(file: Path) -> None:
        file.unlink()
        file.write_bytes(content)

    return written


DAMAGES = {"cut off": lambda file: os.truncate(file, file.stat().st_size // 2), "empty": write(b""),
           "garbled": write(os.urandom(300)), "a list": write(b"[1, 2]"), "a number": write(b"7"), "a folder": to_folder,
           "no step": changed(step=None), "a text for a step": changed(step="4"), "of another": changed(name="step-000009"),
           "another field": changed(loss="x", held_out_loss="x"), "a list of files": changed(elsewhere=[1]),
           "no object": write(b"{}"), "too deep": write(b"[" * 100_000)}
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@pytest.fixture
def here(tmp_path: Path, run: Path) -> Settings:
    """The run's settings, for a mirror in a folder."""
    settings = Settings(f"file://{tmp_path}/store/run", "this-run")
    settings.write(run)
    return settings


def entry(run: Path, name: str) -> Path:
    return run / FOLDER / "waiting" / name


def upload(run: Path) -> bool:
    return upload_all(run, lambda event: None)


def in_store(settings: Settings) -> dict[str, Any]:
    return Shelf(Store(settings.address)).sets()


def told(run: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read_all_events(run / FOLDER / "events.jsonl") if isinstance(event, kind)]


@damages
def test_a_damaged_entry_is_told_again_by_its_files_and_uploaded(
        here: Settings, run: Path, damage: Callable[[Path], None]) -> None:
    folder = made_checkpoint(run, 4)
    (folder / "metadata.json").write_text(json.dumps({"held_out_loss": 0.25}))
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["files"]["metadata.json"]
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    wait_with(run, folder, loss=0.25)
    wait_with(run, made_checkpoint(run, 8), loss=0.5)
    before = [(one.name, one.step, one.held_out_loss) for one in all_waiting(run)]
    damage(entry(run, "step-000004") / ABOUT)
    assert [(one.name, one.step, one.held_out_loss) for one in all_waiting(run)] == before
    assert upload(run)
    assert set(in_store(here)) == {"step-000004", "step-000008"}         # the older one has the lowest loss
    (rebuilt,) = told(run, WaitingRebuilt)
    assert rebuilt.name == "step-000004"
    assert f"{entry(run, 'step-000004') / ABOUT} is damaged" in rebuilt.sentence
    assert list((run / FOLDER / "waiting").iterdir()) == []


def test_a_damaged_entry_of_the_final_model_has_the_step_of_the_newest_checkpoint(here: Settings, run: Path) -> None:
    waiting.add(run, "model", {"weights": made_checkpoint(run, 11) / "model.safetensors"}, step=11)
    (entry(run, "model") / ABOUT).write_text("{")
    assert upload(run)
    assert in_store(here)["model"].step == 11


def test_an_entry_that_lacks_files_is_not_told_as_uploaded_and_stays(here: Settings, run: Path) -> None:
    wait_with(run, made_checkpoint(run, 4))
    (entry(run, "step-000004") / ABOUT).write_text("{")
    (entry(run, "step-000004") / "optimizer.safetensors").unlink()
    assert not upload(run)
    assert told(run, Uploaded) == []
    assert in_store(here) == {}
    (failed,) = told(run, UploadFailed)
    assert "optimizer.safetensors is missing on this disk" in failed.sentence
    assert [one.name for one in all_waiting(run)] == ["step-000004"]


@pytest.mark.parametrize("file", ["MANIFEST.json", MATERIAL_LIST])
def test_an_entry_whose_own_list_is_gone_too_waits_until_it_is_handed_over_again(
        here: Settings, run: Path, tmp_path: Path, file: str) -> None:
    folder, data, listed = made_checkpoint(run, 4), tmp_path / "data.txt", run / "list.json"
    data.write_text("data")
    listed.write_text(json.dumps({"places": {}, "files": {"000000.txt": [str(data), 1]}}))

    def hand_over() -> None:
        wait_with(run, folder)
        waiting.add(run, MATERIAL, {MATERIAL_LIST: listed}, elsewhere={"000000.txt": data})

    hand_over()
    for path in (run / FOLDER / "waiting").iterdir():
        (path / ABOUT).write_text("{")
    harmed = next((run / FOLDER / "waiting").glob(f"*/{file}")).parent.name
    (entry(run, harmed) / file).unlink()
    assert not upload(run)
    assert harmed not in in_store(here)
    assert len(in_store(here)) == 1                      # the other one was rebuilt
    assert [one.name for one in all_waiting(run)] == [harmed]
    hand_over()
    assert upload(run)
    assert set(in_store(here)) == {"step-000004", MATERIAL}
    assert set(in_store(here)[MATERIAL].files) == {MATERIAL_LIST, "000000.txt"}


def test_a_deletion_that_was_killed_midway_leaves_no_set_and_no_hindrance(here: Settings, run: Path) -> None:
    folder = made_checkpoint(run, 4)
    wait_with(run, folder)
    (entry(run, "step-000004") / ABOUT).unlink()         # as an earlier version deleted
    assert all_waiting(run) == []
    wait_with(run, folder)
    assert [one.name for one in all_waiting(run)] == ["step-000004"]
    os.rename(entry(run, "step-000004"), entry(run, ".step-000004.gone"))
    assert upload(run)
    assert list((run / FOLDER / "waiting").iterdir()) == []


@pytest.mark.parametrize("damage", [write(b""), write(os.urandom(300)), write(b"[1]"), write(b"{}"), changed(address=3),
                                    changed(keep="3"), changed(unknown=1)])
def test_damaged_settings_are_refused_with_the_cure(here: Settings, run: Path, damage: Callable[[Path], None]) -> None:
    assert settings_of(run) == here
    damage(run / FOLDER / SETTINGS)
    with pytest.raises(WrongUse, match=r"restore a copy of it, or delete it and give the run a new place with mirror=ADDRESS"):
        settings_of(run)
