"""`events.jsonl`: everything that happens in a run, one JSON object a line, only ever appended to.

Progress line, report, web page and tests read the file; the trainer waits for none of them. records/events.py has the kinds.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse
from powertrain.records.events import End, Event, Resume, from_line, to_line

EVENTS_EVERY_S = 5.0         # a run brings its steps to the disk at least this often, when it reads their losses


class EventLog:
    """Appends events to a file: `write` keeps them in memory, `flush` brings them to the disk.

    Both may be called at any time: from another thread, and from a signal handler in the middle of a flush. A disk that
    refuses loses no event: they wait for the next flush. What a flush had begun to write is cut off before it is written again.
    """

    def __init__(self, path: Path):
        self.path = path
        self.failure: str | None = None      # why the last flush did not reach the disk
        # first the size to cut the file back to, where a flush broke off, else None; then the lines that wait. One list, so
        # that one operation, which nothing can interrupt, says that lines are written
        self._waiting: list[Any] = [None]
        self._lock = threading.RLock()
        self._flushing = False
        self._whole = False                  # the file ends with a line end, as this log has seen

    def write(self, event: Event) -> None:
        self._waiting.append((json.dumps(to_line(event)) + "\n").encode())

    def flush(self, *, durable: bool = False) -> None:
        """Append the events that wait; with `durable`, return only when the disk has them. `failure` says what went wrong."""
        with self._lock:
            if self._flushing:               # from a signal handler: the flush that it interrupted takes its events along
                return
            self._flushing = True
            try:
                if durable or len(self._waiting) > 1:
                    self._append(durable)
                while len(self._waiting) > 1:            # written meanwhile
                    self._append(durable)
                self.failure = None
            except OSError as error:
                self.failure = error.strerror or str(error)
            finally:
                self._flushing = False

    def _append(self, durable: bool) -> None:
        if not self._whole:
            cut_torn_line(self.path)
            self._whole = True
        waiting = self._waiting[:]
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if waiting[0] is None:
                self._waiting[0] = os.lseek(file, 0, os.SEEK_END)
            else:                            # the last flush broke off: its lines come again
                os.ftruncate(file, waiting[0])
            data = b"".join(waiting[1:])
            while data:
                data = data[os.write(file, data):]
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        self._waiting[:len(waiting)] = [None]


def cut_torn_line(path: Path) -> None:
    """Drop the last line where a kill left it without its end."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def read_events(path: Path) -> list[Event]:
    """Return the run's history as it counts: without what came after the checkpoint that a later `resume` went back to."""
    return counted(read_all_events(path))


def counted(written: Sequence[Event]) -> list[Event]:
    """Return the events that count, of all that were written."""
    events: list[Event] = []
    for event in written:
        if isinstance(event, Resume):
            events = [old for old in events if old.step <= event.step and not isinstance(old, End)]
        events.append(event)
    return events


def read_all_events(path: Path) -> list[Event]:
    """Return every event that was written, those that a continuation went back behind too.

    Raises WrongUse for a line that is no event, as a power failure or a hand may leave one.
    """
    with open(path, "rb") as file:           # a line without an end is still being written
        return [_event(line, f"{path}:{number}") for number, line in enumerate(file, start=1) if line.endswith(b"\n")]


def _event(line: bytes, where: str) -> Event:
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or not isinstance(found.get("event"), str):
            raise WrongUse("a line is one JSON object with its event")
        return from_line(found)
    except ValueError as error:              # WrongUse is one too
        raise WrongUse(f"{where} is no event of a run ({error}); the line was damaged or changed by hand: remove it") from None
