"""Where a step's time goes: the parts are all of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from powertrain.training.loop import new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import PARTS, Laps, Setup


def test_a_lap_belongs_to_the_part_that_it_ends() -> None:
    laps = Laps(torch.device("cpu"))
    time.sleep(0.02)
    laps.lap("data")
    laps.lap("forward")
    time.sleep(0.01)
    laps.lap("backward")
    laps.lap("forward")
    found = laps.parts()
    assert tuple(found) == PARTS
    assert found["data"] >= 0.02
    assert found["backward"] >= 0.01
    assert found["copy"] == 0
    assert found["forward"] > 0


def test_the_parts_of_a_step_are_all_of_its_time(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup()
    began = time.perf_counter()
    results = list(train(setup, new_state(setup, 0.1), Schedule("constant", 1e-3, 3), 1.0))
    seconds = time.perf_counter() - began
    parts = [result.laps.parts() for result in results]
    assert all(value > 0 for part in parts for name, value in part.items() if name != "copy")
    assert sum(sum(part.values()) for part in parts) < seconds


def test_the_laps_follow_each_other_without_a_gap() -> None:
    laps = Laps(torch.device("cpu"))
    first = laps._marks[0][1]
    for part in PARTS * 3:
        laps.lap(part)
    assert sum(laps.parts().values()) == pytest.approx(laps._marks[-1][1] - first)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_laps_of_a_device_that_works_behind_the_host_are_between_its_own_events(
        device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((1000.0, 1002.0, 1005.0))

    class Event:
        """Stands in for torch.cuda.Event and torch.mps.Event, in milliseconds."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    monkeypatch.setattr(getattr(torch, device), "Event", Event)
    laps = Laps(torch.device(device))
    laps.lap("forward")
    laps.lap("backward")
    assert (laps.parts()["forward"], laps.parts()["backward"]) == (0.002, 0.003)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="events of a GPU's stream need a GPU")
def test_on_a_gpu_laps_are_the_devices_time() -> None:
    device = torch.device("cuda")
    laps = Laps(device)
    weights = torch.ones(4096, 4096, device=device)
    for _ in range(20):
        weights = weights @ weights * 1e-4
    laps.lap("forward")
    torch.cuda.synchronize()
    assert laps.parts()["forward"] > 1e-3
