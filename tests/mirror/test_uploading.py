"""The process that uploads: killed anywhere and started again; faults of the store; and what waits while it cannot go on."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_sets import made_checkpoint, wait_with

from driver import PRELOADED
from faulty_proxy import Fault, Proxy
from powertrain.mirror import process as uploading
from powertrain.mirror import waiting
from powertrain.mirror.process import LAST_TRIES, LONGEST_PAUSE_S, Orders, Uploader, alone, pause_s, upload_all
from powertrain.mirror.returning import bring_back
from powertrain.mirror.shelf import COMPLETE, Shelf
from powertrain.mirror.store import Store
from powertrain.mirror.waiting import FOLDER, Settings, all_waiting
from powertrain.records.event_log import read_all_events
from powertrain.records.events import Uploaded, UploadFailed, UploadSkipped

OBJECTS = 5                                  # of a made-up checkpoint, without MIRROR.json
POINTS = ("before", "midway", "after")


@pytest.fixture
def here(tmp_path: Path, run: Path) -> Settings:
    """The run's settings, for a mirror in a folder."""
    settings = Settings(f"file://{tmp_path}/store/run", "this-run")
    settings.write(run)
    return settings


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly a pause between two tries."""
    monkeypatch.setattr(uploading, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploading, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(uploading, "LOOK_EVERY_S", 0.01)


def names_in(settings: Settings) -> set[str]:
    return set(Shelf(Store(settings.address)).sets())


def told_in(run: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read_all_events(run / FOLDER / "events.jsonl") if isinstance(event, kind)]


def upload(run: Path) -> bool:
    return upload_all(run, lambda event: None)


def left_over(run: Path, tmp_path: Path) -> list[str]:
    """What an upload must not leave, here and in a store that is a folder."""
    here = [*(run / FOLDER / "waiting").glob("*"), *(run / FOLDER).glob("packed/*"), *(run / FOLDER).glob("*.tmp")]
    there = [*(tmp_path / "store").rglob(".*"), *(tmp_path / "store").rglob("*.tmp")]
    return [str(path) for path in (*here, *there)]


def killed_uploading(run: str, point: str, number: int) -> None:
    """Upload, and kill this process at an object: the last one is MIRROR.json."""
    count = itertools.count(1)

    def at(moment: str, due: bool) -> None:
        if due and moment == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def put(self: Store, file: Path, name: str, sha256: str) -> None:
        due = next(count) == number
        at("before", due)
        if due and point == "midway":
            target = Path(self._path(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes()[:file.stat().st_size // 2])
        at("midway", due)
        original(self, file, name, sha256)
        at("after", due)

    def put_manifest(self: Store, name: str, value: Any) -> None:
        due = name.endswith(COMPLETE) and next(count) == number
        at("before", due)
        original_manifest(self, name, value)
        at("midway", due)
        at("after", due)

    original, original_manifest = Store.put, Store.put_manifest
    Store.put, Store.put_manifest = put, put_manifest  # type: ignore[method-assign]
    upload(Path(run))


def end_of(function: Callable[..., None], *arguments: object) -> int | None:
    """The exit code of a process that runs a function of this file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    assert not process.is_alive()
    return process.exitcode


@pytest.mark.parametrize("number", range(1, OBJECTS + 2))
def test_killed_at_an_object_and_started_again_the_set_is_whole(here: Settings, run: Path, tmp_path: Path, number: int) -> None:
    for point in POINTS:
        folder = made_checkpoint(run, number * 10 + POINTS.index(point))
        wait_with(run, folder)
        assert end_of(killed_uploading, str(run), point, number) == -signal.SIGKILL
        is_there = number == OBJECTS + 1 and point != "before"
        assert (folder.name in names_in(here)) is is_there           # what is half there does not count
        assert upload(run)
        assert left_over(run, tmp_path) == []
        back = tmp_path / f"back-{point}"
        bring_back(here.address, back, lambda text: None)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
            file.name: file.read_bytes() for file in (back / "checkpoints" / folder.name).iterdir()}


def test_an_upload_that_was_killed_and_is_no_longer_wanted_leaves_no_object(here: Settings, run: Path, tmp_path: Path) -> None:
    wait_with(run, made_checkpoint(run, 4))
    assert end_of(killed_uploading, str(run), "after", 3) == -signal.SIGKILL
    wait_with(run, made_checkpoint(run, 8))
    assert upload(run)
    assert [event.name for event in told_in(run, UploadSkipped)] == ["step-000004"]
    assert {name.partition("/")[0] for name in Store(here.address).sizes()} == {"step-000008"}


def test_an_upload_that_failed_midway_and_is_no_longer_wanted_leaves_no_object(
        here: Settings, run: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_with(run, made_checkpoint(run, 4))

    def refuses(file: Path, name: str) -> bool:
        if not name.startswith("step-000004/model"):
            return False
        if not (run / "checkpoints" / "step-000008").exists():
            wait_with(run, made_checkpoint(run, 8))
        return True

    monkeypatch.setattr(Store, "put", _refusing(refuses))
    assert upload(run)
    assert told_in(run, UploadFailed)[0].name == "step-000004"
    assert {name.partition("/")[0] for name in Store(here.address).sizes()} == {"step-000008"}


def test_a_process_left_behind_with_an_upload_in_hand_makes_way_for_the_next(here: Settings, run: Path) -> None:
    wait_with(run, made_checkpoint(run, 4))
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=holding, args=(str(run), ready))
    process.start()
    assert ready.wait(60)
    assert upload(run)
    process.join(60)
    assert process.exitcode == -signal.SIGTERM


def holding(run: str, ready: Any) -> None:
    with alone(Path(run)):
        ready.set()
        signal.pause()


def test_what_killed_processes_have_left_here_is_cleared(here: Settings, run: Path, tmp_path: Path) -> None:
    wait_with(run, made_checkpoint(run, 4))
    half = run / FOLDER / "waiting" / "step-000002"
    half.mkdir()
    (half / "model.safetensors").touch()
    (run / FOLDER / "packed").mkdir()
    (run / FOLDER / "packed" / "events.jsonl.zst").touch()
    (tmp_path / "store" / "run").mkdir(parents=True)
    (tmp_path / "store" / "run" / ".probe-1234").touch()
    draft = run / FOLDER / "waiting" / ".step-000002-77.tmp"
    draft.mkdir()
    waiting.clear_drafts(run)
    assert upload(run)
    assert left_over(run, tmp_path) == []


# ------------------------------------------------------------------------------------------------ faults of the store


@pytest.mark.parametrize("fault", [
    Fault("status", 500, "PUT", "model.safetensors", times=2), Fault("status", 503, "HEAD", times=2),
    Fault("cut_request", 700, "PUT", "model.safetensors", times=2), Fault("cut_request", 0, "PUT", times=1),
    Fault("cut_answer", 40, "GET", "list-type", times=2), Fault("corrupt_request", 100, "PUT", "model.safetensors", times=1),
    Fault("corrupt_request", 100, "PUT", COMPLETE, times=1), Fault("delay", 700, "PUT", "model.safetensors", times=1)],
    ids=lambda fault: f"{fault.kind}-{fault.number}-{fault.key}")
def test_what_passes_ends_in_a_verified_upload(
        bucket: str, proxy: Proxy, run: Path, tmp_path: Path, quick: None, fault: Fault) -> None:
    settings = Settings(f"{bucket}/runs/run", "this-run")
    settings.write(run)
    folder = made_checkpoint(run, 4)
    wait_with(run, folder)
    proxy.faults = [replace(fault)]
    assert upload(run)
    assert proxy.faults[0].times == 0        # it did happen
    assert not any(event.cure for event in told_in(run, UploadFailed))
    bring_back(settings.address, tmp_path / "back", lambda text: None)
    assert (tmp_path / "back/checkpoints/step-000004/model.safetensors").read_bytes() == (
        folder / "model.safetensors").read_bytes()


def test_what_does_not_pass_is_told_at_once_with_a_cure(bucket: str, proxy: Proxy, run: Path, quick: None) -> None:
    Settings(f"{bucket}/runs/run", "this-run").write(run)
    wait_with(run, made_checkpoint(run, 4))
    proxy.faults = [Fault("status", 403, "PUT", "model.safetensors")]
    assert not upload(run)
    (failed,) = told_in(run, UploadFailed)
    assert failed.name == "step-000004"
    assert "the right to read, write and delete" in failed.sentence
    assert "Training is not touched" in failed.sentence
    assert [one.name for one in all_waiting(run)] == ["step-000004"]
    proxy.faults = []
    assert upload(run)


def test_a_store_that_fails_for_long_is_tried_a_few_times_after_the_training(
        here: Settings, run: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_with(run, made_checkpoint(run, 4))
    tries = itertools.count(1)
    monkeypatch.setattr(Store, "put", _refusing(lambda file, name: next(tries) > 0))
    assert not upload(run)
    assert next(tries) == LAST_TRIES + 1
    assert len(told_in(run, UploadFailed)) == 1          # and told once


def test_pauses_are_by_chance_and_have_an_end() -> None:
    pauses = {tries: [pause_s(tries, blocked=False) for _ in range(200)] for tries in (1, 3, 10_000)}
    assert all(len(set(found)) > 100 for found in pauses.values())
    assert max(pauses[1]) <= 4 < max(pauses[3]) <= 16 < max(pauses[10_000]) <= LONGEST_PAUSE_S
    assert min(map(min, pauses.values())) >= 2


def test_a_set_that_cannot_be_uploaded_does_not_hold_up_the_others(
        here: Settings, run: Path, tmp_path: Path, quick: None) -> None:
    data = tmp_path / "data.txt"
    data.write_text("gone before its turn came")
    waiting.add(run, "material", {}, elsewhere={"000000.txt": data})
    data.unlink()
    wait_with(run, made_checkpoint(run, 4))
    assert not upload(run)
    assert names_in(here) == {"step-000004"}
    (failed,) = told_in(run, UploadFailed)
    assert (failed.name, failed.cure) == ("material", "look at the disk and the files of this machine")
    assert str(data) in failed.why


def _refusing(refuses: Callable[[Path, str], bool]) -> Callable[..., None]:
    original = Store.put

    def put(self: Store, file: Path, name: str, sha256: str) -> None:
        if refuses(file, name):
            raise TimeoutError("no answer")
        original(self, file, name, sha256)

    return put


# ------------------------------------------------------------------------------------------------ what waits


def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(here: Settings, run: Path) -> None:
    replace(here, keep_every=10).write(run)
    for step, loss in ((9, 0.5), (10, None), (11, 0.3), (12, None), (13, 0.4), (14, None)):
        wait_with(run, made_checkpoint(run, step), loss=loss)
    assert upload(run)
    assert names_in(here) == {"step-000010", "step-000011", "step-000014"}
    assert [event.step for event in told_in(run, Uploaded)] == [14, 11, 10]
    assert {event.step for event in told_in(run, UploadSkipped)} == {9, 12, 13}


def test_what_waits_outlives_its_checkpoint(here: Settings, run: Path, tmp_path: Path) -> None:
    folder = made_checkpoint(run, 4)
    weights = (folder / "model.safetensors").read_bytes()
    wait_with(run, folder)
    for file in folder.iterdir():
        file.unlink()
    assert upload(run)
    bring_back(here.address, tmp_path / "back", lambda text: None)
    assert (tmp_path / "back/checkpoints/step-000004/model.safetensors").read_bytes() == weights


def test_what_was_uploaded_is_deleted_there_only_after_the_new_one_is_whole(
        here: Settings, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(here, keep=1).write(run)
    wait_with(run, made_checkpoint(run, 4))
    assert upload(run)
    wait_with(run, made_checkpoint(run, 8))
    seen: list[set[str]] = []
    original = Shelf.remove
    monkeypatch.setattr(Shelf, "remove", lambda self, name: (seen.append(set(self.sets())), original(self, name))[1])
    assert upload(run)
    assert seen == [{"step-000004", "step-000008"}]
    assert told_in(run, Uploaded)[-1].deleted == ("step-000004",)


def test_an_uploader_tells_of_its_mirror_before_it_uploads(here: Settings, run: Path) -> None:
    wait_with(run, made_checkpoint(run, 4))
    kinds: list[str] = []
    orders = uploading.Orders(over=True)
    assert Uploader(run, here, orders, lambda event: kinds.append(event.kind)).work()
    assert kinds == ["mirror", "uploaded"]


def test_of_two_runs_that_begin_at_once_at_one_place_the_second_uploads_nothing(tmp_path: Path) -> None:
    began, address = [], f"file://{tmp_path}/store/run"
    for name in ("one", "two"):
        settings = Settings(address, name)
        settings.write(tmp_path / name)
        began.append(Uploader(tmp_path / name, settings, Orders(over=True)))
        wait_with(tmp_path / name, made_checkpoint(tmp_path / name, len(began)))
        began[-1]._open()                    # nothing lies there yet
    assert began[0].work()
    assert not began[1].work()
    assert [(event.name, event.cure) for event in told_in(tmp_path / "two", UploadFailed)] == [
        ("step-000002", "nothing was overwritten")]
    assert names_in(began[0].settings) == {"step-000001"}


@pytest.mark.usefixtures("quick")
def test_what_is_deleted_there_during_its_upload_is_not_told_as_uploaded(run: Path, here: Settings,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = list[str]()

    def put_manifest(self: Store, name: str, value: Any) -> None:
        if not deleted:                      # as another run does that begins meanwhile
            Shelf(self).clear(set())
            deleted.append(name)
        real(self, name, value)

    real = Store.put_manifest
    monkeypatch.setattr(Store, "put_manifest", put_manifest)
    wait_with(run, made_checkpoint(run, 4))
    assert upload(run)
    assert deleted
    assert names_in(here) == {"step-000004"}
    assert len(told_in(run, Uploaded)) == len(told_in(run, UploadFailed)) == 1
