"""The process that follows a run for one tracker: `python -m powertrain.tracking.process`, told on its standard input whom.

The training neither waits for it nor hears of its errors except through tracking/NAME.jsonl. A call of a tracker's library that
does not return is ended with the process. Exit code: 0 the tracker has everything, 3 something is missing.

    tracking/NAME.json    how far events.jsonl was sent, written after the tracker has it
    tracking/NAME.jsonl   what this process has to say
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from powertrain.records import NotDurable, WrongUse, events
from powertrain.records.errors import DONE, first_line
from powertrain.records.event_log import POLL_S, EventLog, EventReader
from powertrain.records.json_files import read_json, write_json
from powertrain.records.locks import got_lock
from powertrain.records.priority import LOWER, lower_process
from powertrain.records.redaction import redacted
from powertrain.tracking.curves import values_of
from powertrain.tracking.material import EVENTS, artefacts, digest
from powertrain.tracking.table import TRACKERS, class_of
from powertrain.tracking.tracker import FOLDER, Followed, Row, Tracker

BATCH = 500                  # rows between two commits
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 120.0  # between two tries: twice as long each time, by chance up to that
LAST_TRIES = 2               # after the run is over
HANGS_S = 120.0              # that one call of a tracker's library may take, or the process ends
LOCK_S = 60.0                # that another process which follows for this tracker is waited for
LONGEST_WHY = 300            # characters of a library's message


@dataclass(frozen=True)
class Position:
    """How far a tracker is: the rows that it has, and the bytes and lines of events.jsonl that gave them."""

    rows: int = 0
    begin: int = 0
    lines: int = 0
    step: int = 0
    ended: str = ""                          # the state of a run that was followed to its end
    place: str = ""                          # where the run is to be seen
    kept: Any = None                         # what the tracker itself has to know
    sent: Any = None                         # sha256 of each artefact


class Orders:
    """Whether more may be written: the process that asked says so, or is gone."""

    def __init__(self, asker: int, lines: TextIO) -> None:
        self._asker, self._lines, self._told = asker, lines, threading.Event()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        for _ in self._lines:
            pass
        self._told.set()                     # the pipe is closed

    @property
    def over(self) -> bool:
        return self._told.is_set() or os.getppid() != self._asker

    def wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self.over and (left_s := until_s - time.monotonic()) > 0:
            self._told.wait(min(left_s, POLL_S))


class Follower:
    """Reads a run's events and gives them to one tracker, each once."""

    def __init__(self, run: Followed, name: str, orders: Orders) -> None:
        self.run, self.name, self.orders = run, name, orders
        self.file, self.log = run.folder / f"{name}.json", EventLog(run.folder / f"{name}.jsonl")
        self.position = _position(self.file)
        self.tracker: Tracker | None = None
        self.last: events.Event | None = None
        self.busy_since_s: float | None = None           # since when a library has been at work

    def work(self) -> int:
        """Follow until the run is over; return the exit code."""
        tries, told = 0, ""
        while True:
            over = self.orders.over          # asked before reading: what was written until then is read
            try:
                if self._send(over=over):
                    return DONE
                tries = 0
                self.orders.wait(POLL_S)
            except Exception as error:       # of the tracker's library
                self._drop()
                tries += 1
                if (why := _why(error)) != told:
                    told = why
                    self._tell(events.TrackerFailed(tracker=self.name, step=self.position.step, why=why,
                                                    cure=TRACKERS[self.name].cure_of(error)))
                if over and tries >= LAST_TRIES:
                    return NotDurable.exit_code
                _pause(tries, self.orders)

    # ---------------------------------------------------------------------------------------- sending

    def _send(self, *, over: bool) -> bool:
        """Send what was written since; return whether that was all. Raises what the tracker's library raises."""
        if self.run.kind == "study":
            self._open()
            self._commit(self.position)
            return self._end("finished")
        if over and self._has_all():
            return True
        self._open()
        reader, there = self._reader(), self.position
        for event in _whole(reader):
            there = self._take(event, replace(there, begin=reader.begin, lines=reader.lines))
            if there.rows - self.position.rows >= BATCH:
                self._commit(there)
        self._commit(replace(there, begin=reader.begin, lines=reader.lines))
        ended = isinstance(self.last, events.End)
        if over or ended:
            return self._end(self.last.reason if isinstance(self.last, events.End) else there.ended or "killed")
        return False

    def _open(self) -> None:
        """Open the tracker, which says how many rows it has: where that is not what was noted, all events are read again."""
        if self.tracker is not None:
            return
        cls = class_of(self.name)            # which takes its time on a busy machine, and waits for nobody
        with self._at_work():
            self.tracker = cls(self.run, self.position.kept or {}, self.position.rows)
        self.tracker.place = redacted(self.tracker.place)            # an address may hold a password
        if self.tracker.rows != self.position.rows:
            self.position = Position()
        self._tell(events.TrackerReady(tracker=self.name, place=self.tracker.place, step=self.position.step))

    def _take(self, event: events.Event, there: Position) -> Position:
        """Give the tracker an event; return the position after it."""
        assert self.tracker is not None
        self.last = event
        text, values = event.text if isinstance(event, events.Sample) else "", values_of(event)
        if isinstance(event, events.Resume | events.Rewound):
            with self._at_work():
                self.tracker.again(event.step, event.time)
        if not values and not text:
            return there
        if there.rows >= self.tracker.rows:  # else it has this row
            with self._at_work():
                self.tracker.row(Row(there.rows, event.step, event.time, values, text))
        return replace(there, rows=there.rows + 1, step=max(there.step, event.step), ended="")

    def _commit(self, there: Position) -> None:
        """Bring what was sent where it stays, then note the position."""
        assert self.tracker is not None
        sent = dict(self.position.sent or {})
        new = [artefact for artefact in artefacts(self.run) if digest(artefact) != sent.get(artefact.name)]
        if there == self.position and not new:
            return
        with self._at_work():
            for artefact in new:
                self.tracker.artefact(artefact)
                sent[artefact.name] = digest(artefact)
            kept = self.tracker.commit()
        self.tracker.rows = max(self.tracker.rows, there.rows)
        self.position = replace(there, kept=kept, sent=sent, place=self.tracker.place)
        write_json(self.file, vars(self.position))

    def _end(self, state: str) -> bool:
        assert self.tracker is not None
        with self._at_work():
            self.tracker.end(state)
            self.tracker.close()
        self.tracker, self.position = None, replace(self.position, ended=state)
        write_json(self.file, vars(self.position))
        return True

    def _has_all(self) -> bool:
        """Return whether the tracker got everything before, and was told the end."""
        done = self.position.ended and self.position.begin == _bytes(self.run.path / EVENTS) and self.tracker is None
        return bool(done) and not any(digest(one) != (self.position.sent or {}).get(one.name) for one in artefacts(self.run))

    def _reader(self) -> EventReader:
        """Return where to read on. A file that was cut after a power failure ends before what was read of it."""
        path = self.run.path / EVENTS
        return EventReader(path, min(self.position.begin, _bytes(path)), self.position.lines)

    # ---------------------------------------------------------------------------------------- trouble

    def _drop(self) -> None:
        """Let go of a tracker that has failed: the next try opens it again, and goes on from what was noted."""
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception), self._at_work():
                tracker.close()
        self.position = _position(self.file)

    def _tell(self, event: events.Event) -> None:
        self.log.write(event)
        self.log.flush()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self.busy_since_s = time.monotonic()
        try:
            yield
        finally:
            self.busy_since_s = None

    def end_where_it_hangs(self, hangs_s: float) -> None:
        """End this process where a call of the library takes too long: nothing else can break it off."""
        while True:
            time.sleep(min(POLL_S, hangs_s / 5))
            if (since_s := self.busy_since_s) is not None and time.monotonic() - since_s > hangs_s:
                self._tell(events.TrackerFailed(tracker=self.name, step=self.position.step,
                                                why=f"it did not answer within {hangs_s:.0f} s"))
                os._exit(NotDurable.exit_code)


def _whole(reader: EventReader) -> Iterator[events.Event]:
    """Yield the events since the last reading, without damaged lines."""
    while True:
        try:
            yield from reader.read()
            return
        except WrongUse:                     # the next reading goes on behind that line
            continue


def _position(file: Path) -> Position:
    """Return the position that was noted; the beginning where none was, or one that cannot be read."""
    try:
        return Position(**read_json(file))
    except (WrongUse, TypeError):
        return Position()


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _why(error: Exception) -> str:
    return first_line(error)[:LONGEST_WHY]


def _pause(tries: int, orders: Orders) -> None:
    """Wait after so many failures: by chance, up to a time that doubles. The end of the run brings the next try."""
    pause_s = random.uniform(FIRST_PAUSE_S, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**min(tries, 30)))
    if orders.over:
        time.sleep(FIRST_PAUSE_S)
    else:
        orders.wait(pause_s)


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[bool]:
    """Be the only one that follows this run for this tracker; yield whether that is so."""
    folder.mkdir(exist_ok=True)
    with open(folder / f".{name}.lock", "a") as file:
        until_s = time.monotonic() + LOCK_S
        while (got := got_lock(file)) is False and time.monotonic() < until_s:
            time.sleep(POLL_S)
        yield got is not False


def main(lines: TextIO) -> int:
    """Follow the run that the first line names."""
    asked = json.loads(lines.readline())
    run = Followed(Path(asked["path"]), asked["id"], asked["kind"], asked["project"], asked["settings"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # of the terminal: the run's end is this process's end
    if asked.get("beside"):
        lower_process(LOWER)                 # at the lowest, points would come minutes late beside a training on all cores
    with _alone(run.path / FOLDER, asked["tracker"]) as alone:
        follower = Follower(run, asked["tracker"], Orders(asked["asker"], lines))
        if not alone:
            follower._tell(events.TrackerFailed(tracker=follower.name, why="another process follows this run for it"))
            return NotDurable.exit_code
        threading.Thread(target=follower.end_where_it_hangs, args=(asked.get("hangs_s", HANGS_S),), daemon=True).start()
        return follower.work()


if __name__ == "__main__":
    code = main(sys.stdin)
    sys.stdout.flush()
    os._exit(code)                           # a library's own threads may never end
