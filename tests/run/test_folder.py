"""What lies in a folder of runs, and in which order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.run.folder import create, list_runs


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
