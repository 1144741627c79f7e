"""A bit flipped, the end cut off, or all of it gone, in each file that a later command reads: no other weights, no traceback.

A run that trains on after the damage ends with the bytes of an undamaged one, or refuses with a sentence. A finished run's
folder is only read: each command then ends in one sentence or does its work.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import AGAIN, RUN, TEXT, Count, Few, World, contents, of_run, stop

PARTS = 4
HOW = ("flipped", "cut", "gone")
READERS = (("runs", "show", "run"), ("generate", "run", "--tokens", "2"), ("report", "run"), ("evaluate", "run"),
           ("train", "--resume", "run"), ("checkpoints", "list", "run"))


def damage(path: Path, how: str, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flipped" and content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content if how == "flipped" else content[:draw.randrange(len(content) + 1)])


def cases(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Yield each file with each kind of damage; bits are flipped at three places."""
    for name in contents(folder):
        for how in HOW:
            yield from ((name, how, seed) for seed in range(3 if how == "flipped" else 1))


@pytest.fixture(scope="module")
def stopped(world: World) -> Path:
    """A run that was stopped in the midst, with checkpoints."""
    return stop(world, "broken-off")[0]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_trains_on_to_the_same_bytes_or_refuses(world: World, few: Few, count: Count, stopped: Path, part: int) -> None:
    found = [case for case in cases(stopped) if case[0].startswith("run/")]
    tried = few(found[part::PARTS], 2)
    for name, how, seed in tried:
        print(name, how, seed)
        folder = world.folder("damaged", stopped)
        damage(folder / name, how, random.Random(f"{name}{seed}"))
        ended = world.run(AGAIN, folder)
        assert ended.code in (0, 1, 2, 3), (ended.code, ended.said[-2000:])
        assert "Traceback" not in ended.said, ended.said[-2000:]
        if ended.code == 0:
            assert {**of_run(folder / "run"), "steps": 0} == {**world.unbroken, "steps": 0}
        else:
            assert "powertrain: " in ended.said, ended.said[-2000:]
    count("damaged files of a run that goes on", len(tried))


def test_data_that_changed_under_a_run_are_refused(world: World, count: Count, stopped: Path) -> None:
    text = world.root / "world" / "text.txt"
    before = text.read_text()
    try:
        text.write_text("line 3 says 1\n" + before)      # the same letters
        ended = world.run(("train", "--resume", "run"), world.folder("other-data", stopped))
    finally:
        text.write_text(before)
    assert ended.code == 2, ended.said[-2000:]
    assert "was begun on other data: ../world/text.txt has changed since" in ended.said
    count("data changed under a run", 1)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_finished_run_is_read_with_a_sentence(world: World, few: Few, count: Count, part: int) -> None:
    tried = few(list(cases(world.root / "whole"))[part::PARTS], 2)
    for number, (name, how, seed) in enumerate(tried):
        if not name.startswith("run/"):
            continue
        folder = world.folder("read", world.root / "whole")
        damage(folder / name, how, random.Random(f"{name}{seed}"))
        words = READERS[(number + part) % len(READERS)]
        print(words, name, how, seed)
        ended = world.run(words, folder)
        assert ended.code in (0, 1, 2, 3, 4, 5), (ended.code, ended.said[-2000:])
        assert "Traceback" not in ended.said, ended.said[-2000:]
    count("damaged files of a finished run", len(tried))


def test_a_damaged_cache_is_made_again(world: World, few: Few, count: Count) -> None:
    world.whole(TEXT, world.folder("case"))
    tried = few(list(cases(world.cache)), 3)
    for name, how, seed in tried:
        print(name, how, seed)
        cache = world.folder("damaged-cache", world.cache)
        damage(cache / name, how, random.Random(f"{name}{seed}"))
        folder = world.folder("case")
        ended = world.whole(RUN, folder, cache=str(cache))
        assert {**of_run(folder / "run"), "steps": 0} == {**world.unbroken, "steps": 0}, ended.said[-1000:]
    count("damaged files of caches", len(tried))
