"""An error of the disk at any call of a flush, once or for ever, leaves every event once and whole in events.jsonl."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powertrain.records.event_log import EventLog, read_all_events
from powertrain.records.events import Step

CALLS = ("open", "lseek", "ftruncate", "write", "fsync", "close")


class BadDisk:
    """Makes the `first`-th call to the disk fail with EIO, or that one and all later ones. Half of a write takes effect."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, *, lasting: bool) -> None:
        self.calls, self.first, self.lasting = itertools.count(1), first, lasting
        self.failed = False
        for name in CALLS:
            patch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            number = next(self.calls)
            if number == self.first or (self.lasting and number > self.first):
                self.failed = True
                if name == "close":
                    call(*arguments)         # as Linux does: the descriptor is gone
                if name == "write":
                    call(arguments[0], arguments[1][:len(arguments[1]) // 2])
                raise OSError(errno.EIO, "Input/output error")
            return call(*arguments)
        return wrapped


def step(number: int) -> Step:
    return Step(step=number, loss=1.0, tokens=1, real_tokens=1, seconds=0.1, learning_rate=0.1, grad_norm=1.0)


def write_steps(path: Path, first: int, last: int, *, durable: bool) -> EventLog:
    log = EventLog(path)
    for number in range(first, last + 1):
        log.write(step(number))
        log.flush(durable=durable)
    return log


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("lasting", [False, True])
def test_an_error_at_any_call_leaves_each_step_once(tmp_path: Path, lasting: bool, durable: bool) -> None:
    tried = 0
    for first in itertools.count(1):
        path = tmp_path / f"{first}.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            disk = BadDisk(patch, first, lasting=lasting)
            log = write_steps(path, 1, 6, durable=durable)
            failed, failure = disk.failed, log.failure
        if not failed:
            break
        tried += 1
        assert not lasting or failure
        after = EventLog(path)               # the next process of the run, which finds what the first one left
        after.write(step(7))
        after.flush(durable=True)
        found = [event.step for event in read_all_events(path)]
        lost = 7 - len(found)                # steps that this disk never took, at the end: their flushes failed
        assert found == [*range(1, 7 - lost), 7], f"error at call {first}: {found}"
        assert not lost or failure
    assert tried >= 6 * 4


def test_what_an_error_kept_back_is_written_when_the_disk_is_well_again(tmp_path: Path) -> None:
    for first in range(1, 30):
        path = tmp_path / f"{first}.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            BadDisk(patch, first, lasting=True)
            log = write_steps(path, 1, 6, durable=True)
        log.flush(durable=True)
        assert log.failure is None
        assert [event.step for event in read_all_events(path)] == [1, 2, 3, 4, 5, 6]
