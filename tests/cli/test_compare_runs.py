"""`powertrain runs compare` and `runs show` on runs as they lie on disk, whole and broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from driver import TINY, run_cli

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Two finished runs, a and b, of which b has another learning rate and plan."""
    path = tmp_path_factory.mktemp("runs")
    (path / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    short = [word for word in TINY if not word.startswith("max_steps")]
    for name, words in (("a", []), ("b", ["learning_rate=1e-3", "techniques.fused_adamw=off"])):
        found = run_cli(["train", "data=text.txt", *short, "max_steps=3", *words, "--output", name, "--quiet"], cache, path)
        assert found[0] == 0, found[2]
    return path


def test_two_runs_are_compared(cli: Cli, folder: Path) -> None:
    code, out, err = cli("runs", "compare", "a", "b", folder=folder)
    assert code == 0, err
    assert "learning_rate" in out
    assert "fused_adamw is on in A" in out
    assert "the runs can be compared: same data, same batch, same model" in out
    assert "powertrain ablate a/recipe.yaml --technique fused_adamw" in out


def test_as_json_it_is_one_object(cli: Cli, folder: Path) -> None:
    code, out, _ = cli("runs", "compare", "a", "b", "--json", folder=folder)
    found = json.loads(out)
    assert code == 0
    assert found["event"] == "comparison"
    assert found["comparable"] is True
    assert [change["name"] for change in found["plan"]] == ["fused_adamw"]
    assert len(found["results"]) == 2
    assert found["losses"][0]["a"] == pytest.approx(found["losses"][0]["b"], rel=1e-3)    # before the first update shows


def test_a_run_is_not_compared_with_itself(cli: Cli, folder: Path) -> None:
    code, _, err = cli("runs", "compare", "a", "a", folder=folder)
    assert code == 2
    assert "are the same run" in err


def test_a_folder_that_is_no_run_is_refused(cli: Cli, folder: Path) -> None:
    code, _, err = cli("runs", "compare", "a", "nowhere", folder=folder)
    assert code == 2
    assert "nowhere does not exist" in err


def test_missing_files_are_named_and_the_rest_is_compared(cli: Cli, folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(folder / name, tmp_path / name)
    (tmp_path / "b" / "facts.json").unlink()
    (tmp_path / "b" / "events.jsonl").unlink()
    code, out, err = cli("runs", "compare", "a", "b")
    assert code == 0, err
    assert "b has no facts.json" in out
    assert "b has no events.jsonl" in out
    assert "learning_rate" in out


@pytest.mark.parametrize("name", ["facts.json", "plan.json", "events.jsonl", "recipe.yaml"])
def test_a_damaged_file_is_a_sentence(cli: Cli, folder: Path, tmp_path: Path, name: str) -> None:
    for run in "ab":
        shutil.copytree(folder / run, tmp_path / run)
    rest = (tmp_path / "b" / name).read_text() if name == "events.jsonl" else ""     # a damaged end of it is passed over
    (tmp_path / "b" / name).write_text("{torn: \n" + rest)
    code, _, err = cli("runs", "compare", "a", "b")
    assert code == 2, err
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("powertrain: ") and "b" in line]


def test_a_run_whose_plan_was_cut_off_is_not_shown(cli: Cli, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "a")
    (tmp_path / "a" / "plan.json").write_text('{"steps": [')
    code, _, err = cli("runs", "show", "a")
    assert code == 2, err
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if "plan.json is not whole JSON" in line]


def test_show_says_where_the_step_time_went(cli: Cli, folder: Path) -> None:
    code, out, _ = cli("runs", "show", "a", folder=folder)
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("Step time"))
    assert all(part in row for part in ("data", "forward", "backward", "optimizer"))
