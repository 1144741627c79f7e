"""The package as others take it: built, installed elsewhere, complete, and described by its files."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver import TINY
from powertrain.records.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


def tracked(below: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", below], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def built(kind: str, source: Path, to: Path) -> Path:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BUILD, kind, str(to)], cwd=source, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the files that git has: nothing that lies about in this checkout."""
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked("."):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.startswith(("tests/", "studies/")):
            (tree / name).write_bytes((ROOT / name).read_bytes())
    return built("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist alone."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with powertrain from the wheel; its dependencies are those of this environment."""
    env = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    python = env / "bin" / "python"
    site = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                               capture_output=True, text=True).stdout.strip())
    others = [path for path in sys.path if path.endswith("site-packages")]
    pip = next(path for path in others if (Path(path) / "pip").is_dir())
    subprocess.run([sys.executable, f"{pip}/pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index",
                    "--no-compile", str(wheel)], check=True)
    (site / "dependencies.pth").write_text("\n".join(others) + "\n")
    return env / "bin"


def run(program: Path, words: Sequence[str], folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(program), *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.startswith("powertrain/")} == {name.removeprefix("src/")
                                                                           for name in tracked("src/powertrain")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"powertrain-{VERSION}-" in wheel.name


def test_the_sdist_has_what_a_reader_looks_for(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "pyproject.toml",
                     "constraints.txt", "src/powertrain/py.typed"}


def test_it_trains_plans_and_reports_without_the_checkout(installed: Path, tmp_path: Path, text: Path, cache: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    words = [f"data={text}", *TINY]
    assert "Plan" in run(installed / "powertrain", ["plan", *words], tmp_path)
    assert "finished" in run(installed / "powertrain", ["train", *words, "max_steps=3", "--output", "run"], tmp_path)
    run(installed / "powertrain", ["report", "run"], tmp_path)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert json.loads(run(installed / "powertrain", ["runs", "show", "run", "--json"], tmp_path))["state"] == "finished"


def test_it_shows_its_page_and_its_files_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    page = subprocess.Popen([str(installed / "powertrain"), "ui", "--port", str(port)], cwd=tmp_path, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)
    assert page.stdout is not None
    try:
        while "#" not in (line := page.stdout.readline()):           # the link with its token
            assert line, "the page did not start"
        for name in ("enter", "static/page.js", "static/page.css"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}") as answer:
                assert (answer.status, len(answer.read()) > 400) == (200, True)
    finally:
        page.terminate()
        page.stdout.close()
        page.wait()


def test_nothing_of_it_comes_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    names = sorted(".".join(("powertrain", *Path(name).relative_to("src/powertrain").with_suffix("").parts))
                   for name in tracked("src/powertrain/cli") if name.endswith(".py"))
    code = (f"import sys, importlib; list(map(importlib.import_module, {names}))\n"
            "ours = [module.__file__ for name, module in sys.modules.items() if name.partition('.')[0] == 'powertrain']\n"
            "assert len(ours) > 20\nprint([file for file in ours if not file.startswith(sys.prefix)])")
    assert run(installed / "python", ["-c", code], tmp_path) == "[]\n"


def test_the_extras_are_named_by_what_they_are_for() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) >= {"tables", "bridge", "qlora", "gguf", "ray", "s3", "deepspeed", "tensorboard", "wandb", "mlflow",
                           "trackio", "trackers", "all", "docs", "dev"}
    named = {name for group in extras.values() for one in group if one.startswith("powertrain[")
             for name in re.findall(r"[\w-]+", one.partition("[")[2])}
    assert named <= set(extras)
    said = re.findall(r"powertrain\[([a-z0-9,]+)\]", "".join(path.read_text(encoding="utf-8")
                                                             for path in (ROOT / "src" / "powertrain").rglob("*.py")))
    assert {name for names in said for name in names.split(",")} <= set(extras)


def test_the_citation_tells_this_version_and_licence() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"], cited["cff-version"]) == (VERSION, PROJECT["license"], "1.2.0")
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").split()[:5] == ["Apache", "License", "Version", "2.0,", "January"]


def test_the_seams_that_contributing_names_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+[\w.]*)`", page.partition("## How to add")[2])
    assert len(named) > 20
    assert not [name for name in named if not ((ROOT / name).exists() or (ROOT / "src" / "powertrain" / name).exists())]


def test_the_dockerfile_copies_only_what_is_there_and_installs_extras_that_exist() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    assert set(copied) <= let_in
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = (line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS="))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(("typed", "completes"), [
    ("tr", {"train", "track"}), ("checkpoints ver", {"verify"}), ("track --t", {"--to"}), ("nothing-like-it", set())])
def test_the_shell_completes_words(typed: str, completes: set[str]) -> None:
    words = f"powertrain {typed}"
    env = {**os.environ, "_POWERTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words,
           "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "powertrain"], env=env, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == completes, done.stderr
