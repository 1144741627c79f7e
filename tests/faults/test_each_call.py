"""The loop of SQLite's tests: the N-th call that changes a file fails, for N = 1, 2, 3, until the operation succeeds.

Operations are the start, saves and final model of a run, its continuation, the stores of tokens and examples, and the
measurements of the machine. A call is killed at, or refused once or for ever. Source: https://sqlite.org/testing.html
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from forked import CALLS, Commands
from layer import AT_CALLS, DAY_S, KILLED, read_log
from runs import (
    AGAIN,
    CODES,
    MEASURED,
    ROWS,
    RUN,
    TEXT,
    Count,
    Few,
    World,
    calls_of,
    check_ended,
    check_recovered,
    check_tidy,
    contents,
    of_run,
    stop,
)

from powertrain.records.event_log import read_all_events

PARTS = 6                    # of the calls of an operation, so that several processes share them
Prepared = Callable[[str], Path]


def shared(calls: int, part: int) -> Sequence[int]:
    """Return one part of the calls, and one number behind the last: there the operation must succeed."""
    return range(1 + part, calls + PARTS + 1, PARTS)


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", AT_CALLS)
def test_a_run_hit_at_any_call_ends_with_the_same_bytes(world: World, few: Few, count: Count, kind: str, part: int) -> None:
    calls = calls_of(world, RUN, folder := world.folder("each"), folder / "run")
    tried = few(shared(calls, part), 1 if kind != "SIGKILL" else 2)
    for call in tried:
        folder = world.folder("each")
        ended = world.run(RUN, folder, fault=AT_CALLS[kind].at(call, folder / "run"))
        print(kind, call, ended.code)
        check_ended(ended, folder / "run", (*CODES, -9))
        check_recovered(world, folder)
    count(f"start, saves and final model: {kind}", len(tried))


@pytest.mark.parametrize("kind", AT_CALLS)
def test_a_save_hit_at_a_write_past_the_page_cache_ends_with_the_same_bytes(world: World, few: Few, count: Count, kind: str
                                                                            ) -> None:
    """The layer sees these writes wherever the file system takes them."""
    folder = world.folder("direct")
    calls = world.whole(RUN, folder, fault={"roots": [str(folder / "run")], "direct": True}).calls
    assert bool(calls) is takes_direct_writes(folder)
    tried = few(range(1, calls + 1), 1)
    for call in tried:
        folder = world.folder("direct")
        ended = world.run(RUN, folder, fault=AT_CALLS[kind].at(call, folder / "run", direct=True))
        print(kind, call, ended.code)
        check_ended(ended, folder / "run", (*CODES, -9))
        check_recovered(world, folder)
    count(f"writes past the page cache: {kind}", len(tried))


def takes_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / ".direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def stopped(world: World) -> Path:
    """A run that was stopped after its third step."""
    return stop(world, "stopped")[0]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", AT_CALLS)
def test_a_continuation_hit_at_any_call_ends_with_the_same_bytes(world: World, few: Few, count: Count, stopped: Path, kind: str,
                                                                 part: int) -> None:
    again, earlier = ("train", "--resume", "run"), len(read_all_events(stopped / "run" / "events.jsonl"))
    folder = world.folder("again", stopped)
    calls = calls_of(world, again, folder, folder / "run")
    tried = few(shared(calls, part), 1)
    for call in tried:
        folder = world.folder("again", stopped)
        ended = world.run(again, folder, fault=AT_CALLS[kind].at(call, folder / "run"))
        print(kind, call, ended.code)
        check_ended(ended, folder / "run", (*CODES, -9), earlier)
        check_recovered(world, folder)
    count(f"continuation: {kind}", len(tried))


@pytest.mark.parametrize("part", range(2))
def test_a_run_hit_twice_ends_with_the_same_bytes(world: World, few: Few, count: Count, part: int) -> None:
    half = world.calls // 2                  # so that each command comes to its call, wherever the one before was killed
    tried = few(range(3 + part, half, 10), 1)
    for call in tried:
        folder = world.folder("twice")
        for one in (call, half + 10 - call, call // 2 + 1):
            assert world.run(AGAIN, folder, fault=KILLED.at(one, folder / "run")).code == -9
        check_recovered(world, folder)
    count("killed three times", 3 * len(tried))


# ------------------------------------------------------------------------------------------------ caches

CACHES = {"token store": (TEXT, "tokens"), "example store": (ROWS, "examples"), "measurements": (MEASURED, "hardware")}


def emptied(world: World, part: str) -> Path:
    """Return a copy of the world's cache without one of its parts."""
    cache = world.folder("hit-cache", world.cache)
    shutil.rmtree(cache / part, ignore_errors=True)
    return cache


@pytest.mark.parametrize("kind", AT_CALLS)
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_hit_at_any_call_is_made_again(world: World, few: Few, count: Count, name: str, kind: str) -> None:
    words, part = CACHES[name]
    world.whole(words, world.folder("case"))             # the rest of the cache is there
    cache = emptied(world, part)
    calls = calls_of(world, words, world.folder("case"), cache / part, cache=str(cache))
    expected = contents(cache / part) if part != "hardware" else None
    tried = few(range(1, calls + 2), 2 if part != "hardware" else 1)
    for call in tried:
        cache = emptied(world, part)
        ended = world.run(words, world.folder("case"), cache=str(cache), fault=AT_CALLS[kind].at(call, cache / part))
        print(name, kind, call, ended.code)
        assert ended.code in (0, 1, 2, -9), ended.said[-2000:]
        assert "Traceback" not in ended.said, ended.said[-2000:]
        for path in cache.rglob("*"):        # what was left behind is cleared a day later: until then somebody may write it
            if re.match(r"\.", path.name):
                os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 2 * DAY_S))
        world.whole(words, world.folder("case"), cache=str(cache))
        assert expected is None or contents(cache / part) == expected
        check_tidy(cache)
    count(f"{name}: {kind}", len(tried))


LASTING = [kind for kind in AT_CALLS if kind.endswith("for ever")]


@pytest.mark.parametrize("kind", LASTING)
def test_a_run_needs_nothing_of_its_cache_but_its_tokens(world: World, few: Few, count: Count, kind: str) -> None:
    """Where the cache takes nothing for ever, what is measured or learned for later runs is lost, and the run is the same."""
    world.whole(TEXT, world.folder("case"))

    def tokens_alone() -> Path:
        cache = world.folder("refusing-cache")
        shutil.copytree(world.cache / "tokens", cache / "tokens")
        return cache

    calls = calls_of(world, RUN, world.folder("case"), cache := tokens_alone(), cache=str(cache))
    tried = few(range(1, calls + 2), 2)
    for call in tried:
        cache, folder = tokens_alone(), world.folder("case")
        ended = world.whole(RUN, folder, cache=str(cache), fault=AT_CALLS[kind].at(call, cache))
        print(kind, call, ended.code)
        assert "Traceback" not in ended.said, ended.said[-2000:]
        assert of_run(folder / "run") == world.unbroken
        check_tidy(folder)
    count(f"all of a run's cache but its tokens: {kind}", len(tried))


# ------------------------------------------------------------------------------------------------ the layer itself

CHANGING = "write,pwrite64,writev,fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,ftruncate"


def test_the_layer_sees_what_strace_sees(world: World, library: Path, tmp_path: Path) -> None:
    """Nothing that changes the run's folder goes past the layer: strace, which sees the kernel's side, counts as many calls.

    But for one: safetensors' writer of the final model renames its own temporary file without the C library.
    """
    assert shutil.which("strace"), "the fault suite needs strace as its second opinion"
    told = tmp_path / "strace"
    folder = world.folder("traced")
    # a file per process: in one file, a call that another process interrupts is two lines, and its result is in the second
    strace = ("strace", "-ff", "-qq", "-y", "-s0", "-e", f"trace={CHANGING}", "-o", str(told))
    with Commands(world.cache, library, strace) as one:
        log = folder / CALLS
        ended = one.run(RUN, folder, within_s=300, fault={"roots": [str(folder / "run")], "log": str(log)})
        assert ended.code == 0, ended.said[-2000:]
    logged = [done.kind for done in read_log(log)]
    lines = [line for path in tmp_path.glob("strace.*") for line in path.read_text().splitlines()]
    seen = [line for line in lines if f"{folder}/run" in line or re.search(r'"run[/"]', line)]
    done = [line for line in seen if " = -1 " not in line and not re.search(r"/\.tmp\w{6}\"", line)]
    for kinds, names in (("w", "write"), ("s", "fsync"), ("r", "rename"), ("u", "unlink|rmdir"), ("t", "ftruncate")):
        by_strace = sum(bool(re.search(rf"\b({names})(at|at2|64|v)?\(", line)) for line in done)
        assert sum(kind in kinds for kind in logged) == by_strace, (names, by_strace)
