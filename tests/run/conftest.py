"""What tests of runs share: a run that nothing has disturbed."""

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
