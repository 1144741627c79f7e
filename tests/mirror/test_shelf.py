"""Sets in a store: published and fetched whole, and what is done with those that are damaged or made to harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from made_sets import made_checkpoint, wait_with

from faulty_proxy import Fault, Proxy
from powertrain.mirror import waiting
from powertrain.mirror.returning import bring_back
from powertrain.mirror.shelf import COMPLETE, Shelf
from powertrain.mirror.store import Store
from powertrain.mirror.waiting import Settings, all_waiting
from powertrain.records import RunFailed, WrongUse
from powertrain.records.checkpoints import MANIFEST, entry_of, what_is_wrong


def publish(run: Path, settings: Settings, step: int, loss: float | None = None) -> Path:
    """Make a checkpoint and upload it; return its folder here."""
    folder = made_checkpoint(run, step)
    wait_with(run, folder, loss=loss)
    (one,) = (one for one in all_waiting(run) if one.name == folder.name)
    Shelf(Store(settings.address)).publish(one, settings, run / "packed")
    waiting.remove(one)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def said_by(address: str, to: Path) -> list[str]:
    said: list[str] = []
    bring_back(address, to, said.append)
    return said


def in_store(settings: Settings) -> Path:
    return Path(settings.address.removeprefix("file://"))


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    """A run in a folder."""
    return Settings(f"file://{tmp_path}/store/run", "this-run")


@pytest.mark.parametrize("compress", ["text", "all", "none"])
def test_what_comes_back_is_what_was_published(settings: Settings, run: Path, tmp_path: Path, compress: str) -> None:
    folder = publish(run, replace(settings, compress=compress), 7)
    shelf = Shelf(Store(settings.address))
    (one,) = shelf.sets().values()
    assert (one.step, one.run, one.bytes) == (7, "this-run", sum(file.stat().st_size for file in folder.iterdir()))
    assert (one.stored_bytes < one.bytes) is (compress != "none")
    shelf.fetch(one, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)
    assert what_is_wrong(tmp_path / "back") is None
    assert not list((run / "packed").glob("*")) if (run / "packed").exists() else True
    assert not [name for name in shelf.store.sizes() if name.startswith(".")]


@pytest.mark.parametrize("harm", ["no manifest", "no object", "shorter object", "half a manifest"])
def test_a_set_that_is_not_complete_does_not_count(here: Settings, run: Path, tmp_path: Path, harm: str) -> None:
    publish(run, here, 4)
    publish(run, here, 8)
    newest = in_store(here) / "step-000008"
    if harm == "no manifest":
        (newest / COMPLETE).unlink()
    elif harm == "no object":
        (newest / "model.safetensors").unlink()
    elif harm == "shorter object":
        os.truncate(newest / "model.safetensors", 2999)
    else:
        os.truncate(newest / COMPLETE, 200)
    assert list(Shelf(Store(here.address)).sets()) == ["step-000004"]
    bring_back(here.address, tmp_path / "back", lambda text: None)
    assert [path.name for path in (tmp_path / "back" / "checkpoints").iterdir()] == ["step-000004"]


def test_a_set_whose_objects_are_gone_is_published_again(here: Settings, run: Path) -> None:
    folder = publish(run, here, 4)
    (in_store(here) / "step-000004" / "model.safetensors").unlink()
    with (folder / "events.jsonl").open("w") as log:     # a run that came here twice has more events
        log.write("{}\n")
    wait_with(run, folder)
    Shelf(Store(here.address)).publish(all_waiting(run)[0], here, run / "packed")
    assert set(Shelf(Store(here.address)).sets()) == {"step-000004"}


@pytest.mark.parametrize("name", ["model.safetensors", "metadata.json.zst"])
def test_a_damaged_object_is_named_and_an_older_checkpoint_is_used(
        here: Settings, run: Path, tmp_path: Path, name: str) -> None:
    publish(run, here, 4)
    publish(run, here, 8)
    damaged = in_store(here) / "step-000008" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    shelf = Shelf(Store(here.address))
    with pytest.raises(RunFailed, match="damaged"):      # before the checkpoint's own manifest is looked at
        shelf.fetch(shelf.sets()["step-000008"], tmp_path / "set")
    assert any("passed over step-000008" in text and "damaged" in text for text in said_by(here.address, tmp_path / "back"))
    assert [path.name for path in (tmp_path / "back" / "checkpoints").iterdir()] == ["step-000004"]


def test_an_object_that_the_server_gives_back_changed_is_passed_over(
        bucket: str, proxy: Proxy, run: Path, tmp_path: Path) -> None:
    settings = Settings(f"{bucket}/run", "this-run")
    publish(run, settings, 4)
    publish(run, settings, 8)
    proxy.faults = [Fault("corrupt_answer", 5, "GET", "step-000008/model.safetensors")]
    assert any("passed over step-000008" in text for text in said_by(settings.address, tmp_path / "back"))
    assert [path.name for path in (tmp_path / "back" / "checkpoints").iterdir()] == ["step-000004"]


def test_a_damaged_final_model_does_not_keep_the_run_from_coming_back(here: Settings, run: Path, tmp_path: Path) -> None:
    publish(run, here, 4)
    waiting.add(run, "model", {"weights": made_checkpoint(run, 5) / "model.safetensors"}, step=5)
    Shelf(Store(here.address)).publish(all_waiting(run)[0], here, run / "packed")
    weights = in_store(here) / "model" / "weights"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert any("passed over model" in text for text in said_by(here.address, tmp_path / "back"))
    assert not (tmp_path / "back" / "model").exists()


def test_another_run_under_this_address_is_refused_and_not_touched(here: Settings, run: Path, tmp_path: Path) -> None:
    folder = publish(run, here, 4)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(WrongUse, match="already holds another run"):
        Shelf(Store(here.address)).check_run("that-run")
    with pytest.raises(WrongUse):            # two that began at the same time
        publish(other, replace(here, run="that-run"), 4)
    bring_back(here.address, tmp_path / "back", lambda text: None)
    assert contents(tmp_path / "back" / "checkpoints" / "step-000004") == contents(folder)


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:-1] + bytes([content[-1] ^ 1])],
                         ids=["a byte less", "a bit flipped"])
def test_a_file_that_was_damaged_here_is_not_published(
        here: Settings, run: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = made_checkpoint(run, 4)
    (folder / "model.safetensors").write_bytes(damage((folder / "model.safetensors").read_bytes()))
    wait_with(run, folder)
    with pytest.raises(RunFailed, match="damaged on this disk"):
        Shelf(Store(here.address)).publish(all_waiting(run)[0], here, run / "packed")
    assert Shelf(Store(here.address)).sets() == {}


@pytest.mark.parametrize("entry", [{}, {"bytes": 3000}, 3000])
def test_a_manifest_that_tells_too_little_of_a_file_is_damaged(here: Settings, run: Path, entry: object) -> None:
    folder = made_checkpoint(run, 4)
    told = json.loads((folder / MANIFEST).read_text())
    told["files"]["model.safetensors"] = entry
    (folder / MANIFEST).write_text(json.dumps(told))
    wait_with(run, folder)
    with pytest.raises(RunFailed, match="no size and sha256 of model"):
        Shelf(Store(here.address)).publish(all_waiting(run)[0], here, run / "packed")


# ------------------------------------------------------------------------------------------------ what was made to harm


def rewrite(settings: Settings, change: Mapping[str, Any]) -> None:
    """Change the MIRROR.json of step 4; change["files"] are entries of model.safetensors."""
    path = in_store(settings) / "step-000004" / COMPLETE
    found = json.loads(path.read_text())
    found["files"]["model.safetensors"].update(change.get("entry", {}))
    for old, new in change.get("renamed", {}).items():
        found["files"][new] = found["files"].pop(old)
    found.update({name: value for name, value in change.items() if name not in ("entry", "renamed")})
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("change", [
    {"renamed": {"model.safetensors": "../../harm"}}, {"renamed": {"model.safetensors": "/tmp/harm"}},
    {"renamed": {"model.safetensors": ".harm"}}, {"renamed": {"model.safetensors": "a" * 300}},
    {"entry": {"stored_as": "../../secret"}}, {"entry": {"more": 1}}, {"entry": {"bytes": "3000"}}, {"entry": {"bytes": -1}},
    {"entry": {"bytes": 3000.0}}, {"entry": {"sha256": 5}}, {"files": []}, {"files": {"a": None}}, {"step": float("inf")},
    {"step": "x"}, {"step": 9}, {"name": "step-000005"}, {"format": 2}, {"held_out_loss": "x"}],
    ids=str)
def test_a_hostile_manifest_makes_no_set(here: Settings, run: Path, change: dict[str, Any]) -> None:
    publish(run, here, 4)
    (in_store(here) / "secret").write_bytes(bytes(3000))
    rewrite(here, change)
    assert Shelf(Store(here.address)).sets() == {}


def test_a_set_that_has_no_room_here_is_refused_before_it_is_fetched(here: Settings, run: Path, tmp_path: Path) -> None:
    publish(run, here, 4)
    rewrite(here, {"entry": {"bytes": 10**17}})
    with pytest.raises(WrongUse, match=r"step-000004 takes .* are free"):
        bring_back(here.address, tmp_path / "back", lambda text: None)
    assert not (tmp_path / "back").exists()


def test_a_bomb_ends_at_the_size_that_the_manifest_tells(here: Settings, run: Path, tmp_path: Path) -> None:
    publish(run, here, 4)
    bomb = zstandard.ZstdCompressor(3).compress(bytes(1 << 28))
    (in_store(here) / "step-000004" / "model.safetensors.zst").write_bytes(bomb)
    rewrite(here, {"entry": {"stored_as": "model.safetensors.zst", "stored_bytes": len(bomb)}})
    largest = 0

    class Watched(Shelf):
        def _fetch_file(self, one: Any, name: str, file: Any, to: Path) -> None:
            nonlocal largest
            try:
                super()._fetch_file(one, name, file, to)
            finally:
                largest = max(largest, to.stat().st_size)

    shelf = Watched(Store(here.address))
    with pytest.raises(RunFailed, match="damaged"):
        shelf.fetch(shelf.sets()["step-000004"], tmp_path / "back")
    assert len(bomb) < 1 << 16
    assert largest <= 3000


@pytest.mark.parametrize("listed", [
    {"files": {"000000.txt": ["/../../../harm", 1]}}, {"files": {"recipe.yaml": ["/a", 1]}}, {"files": {"../x": ["/a", 1]}},
    {"files": {"000000.txt": ["/a"]}}, {"files": []}, {"files": {"000000.txt": [5, 1]}}, {}, [],
    {"files": {"000000.txt": ["/a\0b", 1]}}, {"files": {"000000.txt": ["", 1]}},
    {"files": {"000000.txt": ["/a", 10**30]}}], ids=str)
def test_a_hostile_list_of_material_writes_nothing_elsewhere(here: Settings, run: Path, tmp_path: Path, listed: Any) -> None:
    publish(run, here, 4)
    (run / "material.json").write_text(json.dumps(listed))
    (run / "text").write_text("data")
    waiting.add(run, "material", {"material.json": run / "material.json"}, elsewhere={"000000.txt": run / "text"})
    Shelf(Store(here.address)).publish(all_waiting(run)[0], here, run / "packed")
    before = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    with pytest.raises((RunFailed, WrongUse), match=r"material\.json"):
        bring_back(here.address, tmp_path / "deep" / "back", lambda text: None)
    assert {path for path in tmp_path.rglob("*") if "store" not in path.parts} - before <= {tmp_path / "deep"}


# ------------------------------------------------------------------------------------------------ retention


def test_the_newest_the_best_and_the_multiples_stay(settings: Settings, run: Path) -> None:
    for step in range(1, 9):
        publish(run, settings, step, loss=abs(step - 2.1))
    shelf = Shelf(Store(settings.address))
    assert shelf.keep_only(2, 4) == ["step-000001", "step-000003", "step-000005", "step-000006"]
    assert [one.step for one in shelf.sets().values()] == [2, 4, 7, 8]
    assert {name.partition("/")[0] for name in shelf.store.sizes()} == set(shelf.sets())     # and no object of the others
    assert shelf.keep_only(2, 4) == []


def test_what_somebody_reads_is_not_deleted(settings: Settings, run: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish(run, settings, step)
    other = Shelf(Store(settings.address))
    gone: list[list[str]] = []

    class Reader(Shelf):
        def _fetch_file(self, *arguments: Any) -> None:
            gone.append(other.keep_only(1, 0))
            super()._fetch_file(*arguments)

    shelf = Reader(Store(settings.address))
    shelf.fetch(shelf.sets()["step-000001"], tmp_path / "back")
    assert gone[0] == ["step-000002"]
    assert other.keep_only(1, 0) == ["step-000001"]


@pytest.mark.parametrize("said", [
    {"set": "step-000001", "time": 1e9}, {"set": "step-000001", "time": "x"}, {"a": 1}], ids=str)
def test_a_reader_that_was_killed_counts_for_some_hours(here: Settings, run: Path, said: dict[str, Any]) -> None:
    publish(run, here, 1)
    publish(run, here, 2)
    (in_store(here) / ".reading-step-000001-ab").write_text(json.dumps(said))
    assert Shelf(Store(here.address)).keep_only(1, 0) == ["step-000001"]


def test_the_sizes_of_files_are_those_of_the_bytes(here: Settings, run: Path) -> None:
    folder = publish(run, here, 4)
    files = Shelf(Store(here.address)).sets()["step-000004"].files
    assert {name: {"bytes": one.bytes, "sha256": one.sha256} for name, one in files.items()} == {
        file.name: entry_of(file) for file in folder.iterdir()}
