"""Random faults, one after the other, until the time is over: kills, refusals, signals, pauses and clocks at random calls.

POWERTRAIN_SEED=N repeats one. `make faults MINUTES=30` takes half an hour of them.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from layer import AT_CALLS, HUNG_UP, JUMPS, STOPPED
from runs import AGAIN, Count, World, check_recovered

from powertrain.records.checkpoints import newest_checkpoint

KINDS = (*AT_CALLS.values(), STOPPED, HUNG_UP, *JUMPS)
FAST_S, MOST = 5, 5


def test_random_faults_lose_nothing(world: World, count: Count, request: pytest.FixtureRequest) -> None:
    seed = int(os.environ.get("POWERTRAIN_SEED", time.time_ns() % 10**9))
    whole = request.config.getoption("--faults") is not None
    until, tried = time.monotonic() + (60 * request.config.getoption("--minutes") if whole else FAST_S), 0
    while not tried or time.monotonic() < until:
        draw = random.Random(seed)
        print(f"POWERTRAIN_SEED={seed}", flush=True)
        folder = world.folder("random")
        for _ in range(draw.randint(1, MOST)):           # on one run, one after the other
            more = {"signals": [(draw.uniform(0, 0.4), signal.SIGKILL)]} if draw.random() < 0.3 else {
                "fault": draw.choice(KINDS).at(draw.randint(1, world.calls), folder / "run")}
            ended = world.run(AGAIN, folder, **more)
            assert "Traceback" not in ended.said, ended.said[-2000:]
            assert not newest_checkpoint(folder / "run" / "checkpoints")[1]
            tried += 1
        check_recovered(world, folder)
        seed += 1
    count("random faults", tried)
