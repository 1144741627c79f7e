"""How fast an upload goes beside a training that needs every core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_sets import made_checkpoint, wait_with

from powertrain.mirror import pace, store
from powertrain.mirror.pace import CREDIT_S, SHARE, Pace
from powertrain.mirror.process import Orders, Uploader
from powertrain.mirror.store import Store, hash_of
from powertrain.mirror.waiting import Settings


class Clock:
    """Time that passes when somebody works or sleeps."""

    def __init__(self) -> None:
        self.used_s = self.now_s = 0.0
        self.slept_s = 0.0

    def work(self, seconds: float) -> None:
        self.used_s += seconds
        self.now_s += seconds

    def process_time(self) -> float:
        return self.used_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def test_what_was_taken_is_made_up_for(clock: Clock) -> None:
    paced = Pace(is_over=lambda: False)
    for _ in range(300):
        clock.work(0.01)
        paced.rest()
    assert clock.used_s == pytest.approx(3.0)
    assert clock.used_s == pytest.approx(CREDIT_S + SHARE * clock.now_s, rel=1e-3)


def test_a_long_rest_allows_no_more_than_the_credit(clock: Clock) -> None:
    paced = Pace(is_over=lambda: False)
    clock.sleep(1e6)
    paced.rest()
    before_s = clock.slept_s
    clock.work(CREDIT_S + 0.06)
    paced.rest()
    assert clock.slept_s - before_s == pytest.approx(0.06 / SHARE, abs=1.0)


def test_nobody_rests_once_the_training_is_over(clock: Clock) -> None:
    over = False
    paced = Pace(is_over=lambda: over or clock.slept_s > 1.0)
    clock.work(10.0)
    paced.rest()
    assert 1.0 < clock.slept_s < 2.0         # it ended meanwhile
    before_s, over = clock.slept_s, True
    clock.work(10.0)
    paced.rest()
    assert clock.slept_s == before_s


def test_a_store_rests_after_each_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests = 0

    def rest() -> None:
        nonlocal rests
        rests += 1

    there = Store(f"file://{tmp_path}/store")
    there.keep_pace(rest)
    monkeypatch.setattr(store, "COPIED_BYTES", 1000)
    monkeypatch.setattr(store, "READ_BYTES", 1000)
    file = tmp_path / "weights"
    file.write_bytes(content := bytes(range(256)) * 40)
    there.put(file, "set/weights", hash_of(iter([content])))
    assert rests >= 2 * len(content) // 1000
    assert (tmp_path / "store" / "set" / "weights").read_bytes() == content


@pytest.mark.parametrize("paced", [True, False])
def test_no_part_is_on_its_way_to_s3_while_another_rests(paced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[dict[str, Any]]()
    there, file = Store("s3://bucket/run"), tmp_path / "weights"
    monkeypatch.setattr(there.files, "put_file", lambda *_, **more: sent.append(more))
    file.write_bytes(b"x")
    if paced:
        there.keep_pace(lambda: None)
    there._send(file, "bucket/run/weights")
    assert sent[0]["max_concurrency"] == (1 if paced else 2)


@pytest.mark.parametrize("paced", [True, False])
def test_an_upload_is_paced_where_the_training_needs_every_core(paced: bool, tmp_path: Path, run: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[Callable[[], bool]] = []
    monkeypatch.setattr(Pace, "rest", lambda self: rested.append(self._is_over))
    settings = Settings(f"file://{tmp_path}/store/run", "this-run", paced=paced)
    settings.write(run)
    wait_with(run, made_checkpoint(run, 2))
    orders = Orders(over=True)
    assert Uploader(run, settings, orders).work()
    assert bool(rested) is paced
    orders.over = False
    assert not any(is_over() for is_over in rested)
