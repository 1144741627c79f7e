"""What the fault suite shares: a world with the layer, a part of the faults or all of them, and the counts for the page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import layer
import pytest
from forked import Commands
from runs import Count, Few, T, World, make_world


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layer.build(tmp_path_factory.mktemp("layer"))


@pytest.fixture(scope="session")
def world(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("faults")
    with Commands(root / "cache", library) as commands:
        yield make_world(root, commands)


@pytest.fixture
def few(request: pytest.FixtureRequest) -> Few[T]:
    """few(ALL, MOST): all of them with `--faults`, or each N-th; else at most MOST at even distances."""
    whole, every = request.config.getoption("--faults") is not None, request.config.getoption("--every")

    def choose(found: Sequence[T], most: int) -> list[T]:
        return list(found)[::every] if whole or len(found) <= most else [found[i * len(found) // most] for i in range(most)]

    return choose


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Count:
    """count(WHAT, POINTS): so many faults were tried here, and nothing was lost; for the page of the whole suite."""
    folder = request.config.getoption("--faults")

    def note(what: str, points: int) -> None:
        if folder is not None:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            with open(path / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "points": points, "test": request.node.nodeid}) + "\n")

    return note
