"""Power fails at a random moment, and what was not synced is lost or garbled: a verified checkpoint is found all the same."""

from __future__ import annotations

import random
import shutil

import pytest
from forked import CALLS
from layer import Done, read_log
from power_loss import Disk
from runs import ROWS, RUN, TEXT, Count, World, check_recovered, contents

from powertrain.records.checkpoints import checkpoints_in, newest_checkpoint, what_is_wrong
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import Saved, Step

STATES, FEW, PARTS = 510, 12, 6
IN_RUNS = "runs/run"         # so that the run's own name may be lost too
WORDS = (*RUN[:-1], IN_RUNS)


@pytest.fixture(scope="module")
def done(world: World) -> list[Done]:
    """What an undisturbed run does to its folder."""
    folder = world.folder("logged")
    world.whole(WORDS, folder, fault={"roots": [str(folder / "runs")], "log": str(folder / CALLS)})
    log = list(read_log(folder / CALLS))
    disk = Disk(folder / "runs")
    for one in log:
        disk.do(one)
    for entry in [disk.top, *disk.by_inode.values()]:
        entry.sync()
    disk.write(copy := world.folder("copy"), random.Random(1))
    assert contents(copy) == contents(folder / "runs")    # the log tells everything
    return log


def published(log: list[Done]) -> int:
    """Return how many checkpoints are on the disk for good: the folder of them was synced after the rename."""
    renamed = [at for at, one in enumerate(log) if one.kind == "r" and "/step-" in one.second]
    synced = [at for at, one in enumerate(log) if one.kind == "s" and one.first.endswith(b"/checkpoints")]
    return sum(any(at > place for at in synced) for place in renamed)


@pytest.mark.parametrize("part", range(PARTS))
def test_power_fails_at_any_moment_of_a_run(world: World, done: list[Done], count: Count, request: pytest.FixtureRequest,
                                            part: int) -> None:
    states = (STATES if request.config.getoption("--faults") is not None else FEW) // PARTS
    for seed in range(part * states, (part + 1) * states):
        draw = random.Random(seed)
        print("seed", seed)
        moment = draw.randrange(len(done) + 1)
        disk = Disk(world.root / "logged" / "runs")
        for one in done[:moment]:
            disk.do(one)
        folder = world.folder("lost")
        disk.write(folder / "runs", draw)
        checkpoints = folder / IN_RUNS / "checkpoints"
        whole = [path for path in checkpoints_in(checkpoints).values() if what_is_wrong(path) is None]
        if published(done[:moment]):
            assert whole, f"seed {seed}: no checkpoint is whole, of {published(done[:moment])} that were published"
            newest, _ = newest_checkpoint(checkpoints)
            assert newest is not None
            steps = [event.step for event in read_events(folder / IN_RUNS / "events.jsonl") if isinstance(event, Step)]
            promised = [event.step for event in read_all_events(folder / IN_RUNS / "events.jsonl") if isinstance(event, Saved)]
            assert steps[:int(newest.name[5:])] == [*range(1, int(newest.name[5:]) + 1)]
            assert all(int(newest.name[5:]) >= step for step in promised)
        check_recovered(world, folder, (*WORDS, "--continue"), IN_RUNS)
    count("power loss: states of a run's disk", states)


@pytest.mark.parametrize(("words", "part"), [(TEXT, "tokens"), (ROWS, "examples")])
def test_power_fails_at_any_moment_of_a_store(world: World, count: Count, request: pytest.FixtureRequest,
                                              words: tuple[str, ...], part: str) -> None:
    cache = world.folder("power-cache", world.cache)
    shutil.rmtree(cache / part, ignore_errors=True)
    folder = world.folder("case")
    log = folder / CALLS
    world.whole(words, folder, cache=str(cache), fault={"roots": [str(cache / part)], "log": str(log)})
    done, expected = list(read_log(log)), contents(cache / part)
    states = 60 if request.config.getoption("--faults") is not None else 3
    for seed in range(states):
        draw = random.Random(seed)
        print("seed", seed)
        disk = Disk(cache / part)
        for one in done[:draw.randrange(len(done) + 1)]:
            disk.do(one)
        disk.write(cache / part, draw)
        world.whole(words, world.folder("case"), cache=str(cache))
        found = contents(cache / part)
        assert {name: found.get(name) for name in expected} == expected, f"seed {seed}"
    count(f"power loss: states of the store of {part}", states)
