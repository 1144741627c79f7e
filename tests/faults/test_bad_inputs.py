"""Every bad input ends in time, with a documented exit code and one sentence: see bad_inputs.py.

A part of the cases runs by default; `--bad-inputs` runs all of them, in some ten minutes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_inputs import FIFO, SCRATCH, BadInput, bad_inputs
from forked import Commands
from runs import Count

from adapted_models import make_base
from example_folders import chat_folder, json_lines
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder

FAST = 72                    # cases of each run, spread over all kinds
ENDS_WITHIN_S = 60.0         # beside other tests; alone each takes a fraction of a second, and a template without end three


def chosen(cases: list[BadInput], every: bool) -> list[BadInput]:
    """Return all cases, or FAST of those that are quick, at even distances."""
    quick = [case for case in cases if not case.slow]
    return cases if every else [quick[number * len(quick) // FAST] for number in range(FAST)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the cases, with `world` in it: a text, rows, a tiny model."""
    root = tmp_path_factory.mktemp("inputs")
    world = root / "world"
    world.mkdir()
    (world / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)))
    json_lines(world / "rows.jsonl", [{"messages": [{"role": "user", "content": f"what is {i}"},
                                                    {"role": "assistant", "content": f"it is {i * i}"}]} for i in range(40)])
    tokenizer = open_example_tokenizer(chat_folder(root / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=96), world / "chat", tokenizer)
    return root


@pytest.fixture(scope="module")
def commands(root: Path) -> Iterator[Commands]:
    with Commands(root / "cache") as commands:
        words = [word.replace("../world/", "") for word in SCRATCH]
        ended = commands.run(("train", *words, "--output", "run"), root / "world", within_s=300)
        assert ended.code == 0, ended.said
        yield commands


def write_files(case: BadInput, folder: Path, world: Path) -> None:
    """Make the files of a case: copies of something of the world, a pipe, a half of what is there, changed fields, or bytes."""
    for name, content in case.files.items():
        path = folder / name.removesuffix("+")
        if isinstance(content, Path):
            shutil.copytree(world / content, path)
            continue
        if path.parent.is_file():
            path.parent.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_bytes() if path.is_file() else b""
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if content == FIFO:
            os.mkfifo(path)
        elif content == "half":
            path.write_bytes(old[:len(old) // 2])
        elif isinstance(content, bytes):
            changed = json.dumps({**json.loads(old), **json.loads(content)}).encode() if name.endswith("+") else content
            path.write_bytes(changed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = chosen(bad_inputs(), metafunc.config.getoption("--bad-inputs"))[::metafunc.config.getoption("--every")]
        metafunc.parametrize("case", cases, ids=[case.name.encode("ascii", "backslashreplace").decode() for case in cases])


def test_a_bad_input_ends_in_one_sentence(case: BadInput, root: Path, commands: Commands, count: Count) -> None:
    folder = root / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_files(case, folder, root / "world")
    ended = commands.run(case.words, folder, case.stdin, within_s=ENDS_WITHIN_S)
    assert ended.code is not None, f"it did not end within {ENDS_WITHIN_S:g} s: {ended.said[-500:]}"
    assert "Traceback" not in ended.said, ended.said[-2000:]
    assert ended.code in case.codes, ended.said[-500:]
    if ended.code in (1, 2):
        sentences = [line for line in ended.said.splitlines() if line.startswith(("powertrain: ", "Error: ", "Usage: "))]
        assert sentences, ended.said[-500:]
    count("bad inputs", 1)


def test_the_table_is_large_and_has_every_kind() -> None:
    cases = bad_inputs()
    assert len(cases) >= 2000
    assert len(chosen(cases, every=False)) == FAST
    kinds = {case.words[0] for case in chosen(cases, every=False)}
    assert {"plan", "train", "generate", "chat", "data", "audit", "runs"} <= kinds
