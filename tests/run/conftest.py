"""What tests of runs share: a run that nothing has disturbed, and a small base model with pairs of answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver import TINY, run_cli


@pytest.fixture(scope="session")
def unbroken(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the fixture `words`, from its first step to its end. No test changes it."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, _, err = run_cli(["train", f"data={text}", *TINY, "--output", "run"], cache, folder)
    assert code == 0, err
    return folder / "run"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from test_finetuning import tiny_llama

    return tiny_llama(tmp_path / "base")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    from test_finetuning import rows_file

    return rows_file(tmp_path / "pairs.jsonl", [
        {"prompt": f"what is {i}" + "?" * (i % 5), "chosen": f" it is {i * i}", "rejected": f" no idea, {i}"}
        for i in range(60)])
