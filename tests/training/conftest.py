"""Runs of a model as small as a test file says in SMALL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.recipe import resolve
from powertrain.run.part import new_run
from powertrain.run.prepare import prepare
from powertrain.run.session import run


@pytest.fixture
def train(request: pytest.FixtureRequest, text: Path, cache: Path, tmp_path: Path) -> Callable[..., Path]:
    """Trains with these words and the file's SMALL, in this process; gives the run's folder."""

    def start(name: str, *words: str) -> Path:
        resolved = resolve(None, [f"data={text}", *request.module.SMALL, *words, f"output_dir={tmp_path / name}"])
        with new_run(prepare(resolved, cache, lambda said: None), lambda event: None, lambda *_: "") as part:
            run(part)
        return tmp_path / name

    return start
