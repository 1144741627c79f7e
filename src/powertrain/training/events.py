"""`events.jsonl`: everything that happens in a run, one JSON object a line, only ever appended to.

Progress line, report, web page and tests read it; the trainer waits for none of them. A disk that is full loses no
training: events wait in memory until they can be written.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse

EVENTS_EVERY_S = 5.0         # a run brings its steps to the disk at least this often, when it reads their losses


class EventLog:
    """Appends events to a file. `write` keeps them in memory, `flush` brings them to disk."""

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[str] = []
        self.failure: str | None = None      # why the last flush did not reach the disk
        cut_torn_line(path)

    def write(self, event: str, **fields: Any) -> None:
        self._waiting.append(json.dumps({"event": event, "time": round(time.time(), 3), **fields}) + "\n")

    def flush(self, *, durable: bool = False) -> None:
        """Append what waits; with `durable`, return only when the disk has it. A failure keeps it for the next try."""
        if not self._waiting:
            return
        data = "".join(self._waiting).encode()
        try:
            with open(self.path, "ab") as file:
                before = file.tell()
                try:
                    file.write(data)
                    file.flush()
                    if durable:
                        os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, before)
                    raise
        except OSError as error:
            self.failure = error.strerror or str(error)
            return
        self._waiting, self.failure = [], None


def cut_torn_line(path: Path) -> None:
    """Drop the last line where a kill left it without its end."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        os.truncate(path, whole)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The run's history as it counts: what came after the checkpoint that a later `resume` went back to is left out."""
    events: list[dict[str, Any]] = []
    for event in read_all_events(path):
        if event["event"] == "resume":
            events = [old for old in events if old.get("step", 0) <= event["step"] and old["event"] != "end"]
        events.append(event)
    return events


def read_all_events(path: Path) -> list[dict[str, Any]]:
    """Every event that was written, those that a continuation went back behind too.

    Raises WrongUse for a line that is no event, as a power failure or a hand may leave one.
    """
    with open(path, "rb") as file:           # a line without an end is still being written
        return [_event(line, f"{path}:{number}") for number, line in enumerate(file, start=1) if line.endswith(b"\n")]


def _event(line: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        found, because = None, str(error)
    else:
        because = "a line is one JSON object with its event"
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        raise WrongUse(f"{where} is no event of a run ({because}); it was damaged or changed by hand: take that line out")
    return found
