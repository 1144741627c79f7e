"""Every command that the README shows is run, in its order and in one folder, as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver import run_cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# appended to commands that train: the same on a model that takes a second. What only plans is run as it is written
QUICK = ["model.layers=1", "model.width=32", "model.heads=2", "train_batch_size=4", "max_steps=2", "data.max_chars=4000",
         "sample.prompt=", "sample.tokens=2", "techniques.threads=off", "data.block=16"]
# the same for a command that tunes a trained model: the model is BASE's
BASE = ["train", "default", *QUICK[:-1], "data.block=200", "data.max_chars=60000", "--output", "runs/base"]
QUICK_TUNING = ["model.path=runs/base", "train_batch_size=4", "max_steps=2", "data.max_examples=40", "data.long_examples=drop",
                "techniques.threads=off"]


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def quick(words: list[str]) -> list[str]:
    """The words with those of QUICK that do not stand in them already; a resumed run keeps its own."""
    if words[0] != "train" or "--resume" in words or "--dry-run" in words:
        return words
    given = {word.partition("=")[0] for word in words}
    added = [word for word in (QUICK_TUNING if "docstrings" in words else QUICK) if word.partition("=")[0] not in given]
    return [*[word for word in words if not word.startswith("train_time_s")], *added]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader")
    shutil.copy(ROOT / "README.md", path)
    return path


def test_it_opens_with_the_two_commands() -> None:
    assert commands()[:2] == ["make demo", "make test"]
    assert README.index("make demo") < 60


def test_every_powertrain_command_works_in_its_order(cache: Path, folder: Path) -> None:
    lines = [line for line in commands() if line.startswith("powertrain ")]
    assert len(lines) >= 16
    code, _, err = run_cli([word for word in BASE if word != "data.max_chars=4000"], cache, folder)
    assert code == 0, err
    for line in lines:
        words = quick(shlex.split(line)[1:])
        code, out, err = run_cli(words, cache, folder)
        assert code == 0, f"{line}\n{err}"
        assert out, line


def environment() -> Iterator[tuple[str, str]]:
    """The Makefile's variables that stand for this test's interpreter, where everything is installed already."""
    yield "BIN", str(Path(sys.executable).parent)
    yield "STAMP", str(ROOT / "pyproject.toml")


def make(target: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    given = [f"{key}={value}" for key, value in (*environment(), *variables.items())]
    return subprocess.run(["make", "-C", str(ROOT), target, *given], capture_output=True, text=True, check=False,
                          env={**os.environ, "POWERTRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"})


def test_make_demo_trains_and_shows_the_plan_and_the_samples(tmp_path: Path) -> None:
    words = " ".join([*QUICK, "--output", str(tmp_path / "run")])
    found = make("demo", tmp_path, WORDS=words)
    assert found.returncode == 0, found.stderr
    assert all(word in found.stdout for word in ("Sample", "bits per byte", "gzip -9 needs", "the plan expected"))
    assert all(word in found.stderr for word in ("Machine", "Plan  on", "Plan  off", "Expected"))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_make_test_runs_the_tests(tmp_path: Path) -> None:
    found = make("test", tmp_path, TESTS="tests/test_architecture.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"\d+ passed", found.stdout)


def test_make_check_lints_and_types_and_tests(tmp_path: Path) -> None:
    found = make("check", tmp_path, TESTS="tests/training/test_schedule.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Success: no issues found" in found.stdout


def test_the_recipes_in_the_table_are_those_that_ship() -> None:
    from powertrain.recipe import shipped_recipes

    table = README.partition("## Recipes that ship")[2].partition("Each says")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named == set(shipped_recipes())


def test_the_measured_table_is_what_the_studies_say() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import table

    assert table.in_text(README) == table.rows()


def test_the_formats_in_the_table_are_those_that_are_read() -> None:
    from powertrain.data.rows.formats import FORMATS

    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    assert {line.split("`")[1] for line in page.partition("## Methods")[0].splitlines() if line.startswith("| `")} == {
        known.name for known in FORMATS}


@pytest.mark.parametrize("page", ["README.md", "docs/ARCHITECTURE.md", "docs/techniques.md", "docs/fine-tuning.md"])
def test_links_and_files_named_in_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    rooms = "src|tests|docs|benchmarks|studies|cli|data|models|run|training|report|facts|cost"
    paths = re.findall(rf"`((?:{rooms})/[\w./-]+)`", text)
    missing += [path for path in paths if not ((ROOT / path).exists() or (ROOT / "src/powertrain" / path).exists())]
    assert not missing
