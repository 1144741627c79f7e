"""What lies in a folder of runs, and in which order."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.origins import COMMAND_LINE, DEFAULT, Origin
from powertrain.run import part
from powertrain.run.folder import (
    RunFolder,
    check_free,
    continued,
    create,
    existing,
    list_runs,
    locked,
    stored_recipe,
    write_beginning,
)
from powertrain.training.ranks import ALONE


def test_runs_of_the_same_minute_are_listed_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    names = [f"run-{number * 7 % 16:02d}" for number in range(16)]
    for second, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").touch()
        event = {"event": "start", "time": 1_800_000_000.0 + second, "name": name, "total_steps": 1}
        (tmp_path / name / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert [run.folder.name for run in list_runs(tmp_path)] == names


def test_a_run_that_never_began_is_listed_first(tmp_path: Path) -> None:
    for name in ("began", "zero"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").touch()
    (tmp_path / "began" / "events.jsonl").write_text('{"event": "start", "time": 1800000000.0}\n')
    assert [run.folder.name for run in list_runs(tmp_path)] == ["zero", "began"]


def test_the_output_folder_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = create(resolve(None, ["output_dir=~/runs/one"]).recipe)
    assert folder.path == tmp_path / "home" / "runs" / "one"
    assert not (tmp_path / "~").exists()


def test_runs_that_begin_at_once_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = resolve(None, []).recipe
    all_there = threading.Barrier(16)

    def begin(_: int) -> Path:
        all_there.wait()
        return create(recipe).path

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(begin, range(16)))) == 16


@pytest.mark.parametrize("occupy", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_no_folder_of_runs_can_be_made(occupy: Callable[[Path], None], tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    occupy(tmp_path / "runs")
    with pytest.raises(WrongUse, match="cannot be written"):
        create(resolve(None, []).recipe)


def test_a_runs_recipe_is_read_back_with_its_origins(tmp_path: Path) -> None:
    resolved = resolve(None, ["model.layers=3", "techniques.bf16=off", "techniques.micro_batch.examples=2", "method=scratch",
                              'sample.prompt="a  # b: c"', "adam_epsilon=1e-8"])
    resolved = resolved.with_planned({"model.heads": (6, "a head of 64")})
    folder = RunFolder(tmp_path)
    write_beginning(folder, {}, {}, resolved)
    expected = {
        "model.layers": (3, COMMAND_LINE), "data.source": ("stdlib", Origin("recipe", "default")), "seed": (42, DEFAULT),
        "techniques.bf16": ("off", COMMAND_LINE), "techniques.micro_batch": ({"examples": 2}, COMMAND_LINE),
        "sample.prompt": ("a  # b: c", COMMAND_LINE), "adam_epsilon": (1e-8, COMMAND_LINE),
        "model.heads": (6, Origin("planner", reason="a head of 64"))}
    found = stored_recipe(folder)
    assert {key: found[key] for key in expected} == expected
    folder.origins.unlink()                  # a run of before origins.json: the comments say the same
    assert stored_recipe(folder) == found
    assert resolve(str(folder.recipe)).recipe == resolved.recipe


@pytest.mark.parametrize(("recipe", "origins", "says"), [
    ("{torn: \n", None, "not YAML"), ("\n", None, "is empty"),
    ("seed: 4\n", '{"seed": {"kind": "file", "colour": "red"}}', "colour"),
    ("seed: 4\n", '{"seed": ', "JSON")])
def test_a_recipe_that_no_run_wrote_is_refused(tmp_path: Path, recipe: str, origins: str | None, says: str) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text(recipe)
    if origins is not None:
        folder.origins.write_text(origins)
    with pytest.raises(WrongUse, match=says):
        stored_recipe(folder)


def test_an_address_in_place_of_a_run_is_named_as_one() -> None:
    with pytest.raises(WrongUse, match="is an address, and this wants a run's folder"):
        existing(Path("file:///mnt/nas"))


def test_a_recipe_without_origins_is_read_with_unknown_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text("seed: 4\nmodel:\n  layers: 2  # a note of the user\n")
    assert stored_recipe(folder) == {"seed": (4, Origin("unknown")),
                                     "model.layers": (2, Origin("unknown", "a note of the user"))}


def test_a_run_may_be_shared_in_another_way_when_it_continues_and_is_no_other_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text("name: run\ntechniques: {sharding: {stage: 3}, packing: off}\n", encoding="utf-8")
    other = continued(folder, ["techniques.sharding=off", "techniques.pipeline_parallel=on", "save_steps=7"]).recipe
    assert other.techniques == {"sharding": "off", "packing": "off", "pipeline_parallel": "on"}
    with pytest.raises(WrongUse, match=r"techniques\.packing=on \(the run has off\)"):
        continued(folder, ["techniques.packing=on"])


@pytest.mark.parametrize(("written", "order"), [("", "sorted"), ("data: {order: keyed}\n", "keyed")])
def test_a_run_of_before_orders_had_a_key_goes_on_in_its_own(written: str, order: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recipe.write_text(f"name: run\n{written}", encoding="utf-8")
    assert continued(folder, ["save_steps=7"]).recipe.data.order == order


def test_a_run_that_another_process_made_while_the_lock_was_waited_for_is_kept(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def late(folder: RunFolder) -> Iterator[None]:
        with locked(folder):
            folder.recipe.write_text("name: other\n", encoding="utf-8")
            yield

    monkeypatch.setattr(part.run_folder, "locked", late)
    recipe = resolve(None, [f"output_dir={tmp_path / 'run'}"]).recipe
    with pytest.raises(WrongUse, match="already holds a run"), part._in_folder(ALONE, lambda: create(recipe), is_new=True):
        pass


def test_a_run_that_begins_while_its_folder_is_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def begun(path: Path) -> list[Path]:
        (tmp_path / "recipe.yaml").write_text("name: other\n", encoding="utf-8")
        return list(listed(path))

    monkeypatch.setattr(Path, "iterdir", begun)
    with pytest.raises(WrongUse, match="already holds a run"):
        check_free(tmp_path)


def test_no_start_is_refused_because_others_look_at_the_lock(tmp_path: Path) -> None:
    """Two who look without a pause hold the lock, shared, nearly all of the time."""
    (tmp_path / ".lock").touch()
    look = ("import sys; from pathlib import Path; from powertrain.run.folder import RunFolder, is_being_written\n"
            "folder = RunFolder(Path(sys.argv[1])); print('ready', flush=True)\nwhile True: is_being_written(folder)")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            looking = stack.enter_context(subprocess.Popen([sys.executable, "-c", look, str(tmp_path)], text=True,
                                                           stdout=subprocess.PIPE))
            stack.callback(looking.kill)
            assert looking.stdout is not None
            assert looking.stdout.readline() == "ready\n"
        for _ in range(200):
            with locked(RunFolder(tmp_path)):
                pass
