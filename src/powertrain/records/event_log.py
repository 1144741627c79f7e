"""`events.jsonl`: everything that happens in a run, one JSON object a line, only ever appended to.

Progress line, report, page and trackers read the file; the trainer waits for none of them. A line has `event`, the kind (see
events.py), `about`, the kind of a warning or note, and the fields of the class. JSON has no NaN and no infinity: a number
that is not finite is the text "nan", "inf" or "-inf". Fields and kinds of a later version are kept (`more`, `Unknown`).
"""

import dataclasses
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.records import WrongUse, to_plain
from powertrain.records.events import KINDS, End, Event, Resume, Rewound, Step, Unknown
from powertrain.records.json_files import sync
from powertrain.records.redaction import redacted

if TYPE_CHECKING:
    from pydantic import TypeAdapter

EVENTS_EVERY_S = 1.0         # a run brings its steps to the disk at least this often, when it reads their losses
POLL_S = 0.5                 # between two looks of a follower at the file
SYNCED = {"start", "resume", "checkpoint", "end"}        # events that are on the disk before anything else happens


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
        self._named = False                  # the disk has the file's name

    def write(self, event: Event) -> None:
        line = json.dumps(to_line(event))
        # a step holds numbers alone, and there may be hundreds a second
        self._waiting.append(((line if isinstance(event, Step) else redacted(line)) + "\n").encode())

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
            _cut_torn_tail(self.path)
            self._whole = True
        waiting = self._waiting[:]
        binary = getattr(os, "O_BINARY", 0)  # of Windows, where a line would else end in two bytes
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | binary, 0o666)
        try:
            if waiting[0] is None:
                self._waiting[0] = os.lseek(file, 0, os.SEEK_END)
            else:                            # the last flush broke off: its lines come again
                os.ftruncate(file, waiting[0])
            for lines in _parts(waiting[1:]) if durable else [waiting[1:]]:
                data = b"".join(lines)
                while data:
                    data = data[os.write(file, data):]
                if durable:
                    os.fsync(file)
        finally:
            os.close(file)
        if durable and not self._named:
            sync(self.path.parent)
            self._named = True
        self._waiting[:len(waiting)] = [None]


def _parts(lines: Sequence[bytes]) -> list[list[bytes]]:
    """Return the lines in parts between which the disk is waited for: all that precedes an event of SYNCED is there before it.

    So a line that is damaged before such an event was not damaged by a power failure.
    """
    parts: list[list[bytes]] = [[]]
    for line in lines:
        if _event_of(line) in SYNCED:
            parts.append([])
        parts[-1].append(line)
    return parts


def _cut_torn_tail(path: Path) -> None:
    """Drop the last line where a kill left it without its end, and a tail that a power failure has damaged."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        lines, whole = list(file), 0
    for number, line in enumerate(lines):
        if not line.endswith(b"\n") or (_event_of(line) is None and _is_tail(lines[number:])):
            os.truncate(path, whole)
            return
        whole += len(line)


def _is_tail(lines: Sequence[bytes]) -> bool:
    """Return whether a power failure may have damaged these last lines: the disk was never waited for after any of them."""
    return not any(_event_of(line) in SYNCED for line in lines)


def _event_of(line: bytes) -> str | None:
    """Return the kind of event of a line; None for a damaged one."""
    try:
        return str(json.loads(line)["event"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


# ------------------------------------------------------------------------------------------------ reading


def read_events(path: Path) -> list[Event]:
    """Return the run's history as it counts: without what a later `resume` or rewind went back behind."""
    return counted(read_all_events(path))


def counted(written: Sequence[Event]) -> list[Event]:
    """Return the events that count, of all that were written."""
    events: list[Event] = []
    for event in written:
        if isinstance(event, Resume | Rewound):
            events = [old for old in events if old.step <= event.step and not isinstance(old, End)]
        events.append(event)
    return events


def read_all_events(path: Path) -> list[Event]:
    """Return every event that was written, those that a continuation went back behind too; none where there is no file.

    Raises WrongUse as `followed` does.
    """
    return list(followed(path, is_over=lambda: True)) if path.is_file() else []


@dataclass
class EventReader:
    """Reads a file of events that grows: each `read` yields the events that were written since the last one."""

    path: Path
    begin: int = 0                           # bytes and lines that were read
    lines: int = 0

    def read(self, *, over: bool = False) -> Iterator[Event]:
        """Raises WrongUse for a line that is no event; the next `read` goes on behind it. An OSError is the caller's.

        Where the run is `over`, a damaged tail that the disk was never waited for ends the events.
        """
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            whole = [line for line in file if line.endswith(b"\n")]          # one without an end is still being written
        for number, line in enumerate(whole):
            self.begin, self.lines = self.begin + len(line), self.lines + 1
            try:
                event = _event(line, f"{self.path}:{self.lines}")
            except WrongUse:
                if over and _event_of(line) is None and _is_tail(whole[number:]):
                    return
                raise
            yield event

    def read_whole(self) -> tuple[list[Event], str]:
        """Return the events written since the last reading, without damaged lines, and what is said of the last of those."""
        found, problem = list[Event](), ""
        while True:
            try:
                found.extend(self.read())
                return found, problem
            except WrongUse as error:        # events before that line are in the list, and the next reading goes on behind it
                problem = str(error)
            except OSError:                  # not there yet, or deleted
                return found, problem


def followed(path: Path, is_over: Callable[[], bool] = lambda: False) -> Iterator[Event]:
    """Yield the events of a run: those that are there, then each as it is written. For followers in a process of their own.

    The last one is the `end` that nothing follows; `is_over` says that no more will be written without one. A `resume`, and a
    warning that the run has rewound, mean that the steps after their own `step` will come again. Raises FileNotFoundError where
    a run that is over has no such file, and WrongUse for a line that is no event, as a power failure or a hand may leave one.
    """
    event, reader = None, EventReader(path)
    while True:
        over = is_over()                     # asked before reading: what was written until then is read
        if over or path.exists():
            for event in reader.read(over=over):
                yield event
        if over or isinstance(event, End):
            return
        time.sleep(POLL_S)


def _event(line: bytes, where: str) -> Event:
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or not isinstance(found.get("event"), str):
            raise WrongUse("a line is one JSON object with its event")
        return from_line(found)
    except ValueError as error:              # WrongUse is one too
        raise WrongUse(f"{where} is no event of a run ({error}); the line was damaged or changed by hand: remove it") from None


# ------------------------------------------------------------------------------------------------ lines


def to_line(event: Event) -> dict[str, Any]:
    """Return the event as JSON holds it. A field that is None is left out: what is unknown is absent."""
    about = getattr(event, "about", "")
    head = {"event": event.event if isinstance(event, Unknown) else event.kind, **({"about": about} if about else {})}
    plain = to_plain(event, lambda value: str(value) if isinstance(value, float) and not math.isfinite(value) else value)
    fields = {name: value for name, value in plain.items() if value is not None and name not in ("more", "event")}
    return {**head, **fields, **plain["more"]}


def from_line(line: Mapping[str, Any]) -> Event:
    """Return the event of a line, of any version. Raises WrongUse where a field is missing or of another type."""
    from pydantic import ValidationError

    line = _upgraded(line)
    cls = _classes().get((line["event"], line.get("about", ""))) or _classes().get((line["event"], ""), Unknown)
    known = _names()[cls]
    read = {name: value for name, value in line.items() if name in known}
    more = {} if len(read) + ("event" not in known) == len(line) else {
        name: value for name, value in line.items() if name not in known and name != "event" and (
            name, value) != ("about", getattr(cls, "about", None))}
    try:
        return _adapters()[cls].validate_python({"time": 0.0, **read, "more": more})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise WrongUse(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None


@cache
def _classes() -> dict[tuple[str, str], type[Event]]:
    return {(kind.kind, getattr(kind, "about", "")): kind for kind in KINDS}


@cache
def _names() -> dict[type[Event], set[str]]:
    return {kind: {one.name for one in dataclasses.fields(kind)} for kind in (*KINDS, Unknown)}


@cache
def _adapters() -> "dict[type[Event], TypeAdapter[Event]]":
    from pydantic import TypeAdapter

    return {kind: TypeAdapter(kind) for kind in (*KINDS, Unknown)}


# ------------------------------------------------------------------------------------------------ lines of version 1

# Version 1 told warnings and failures as sentences only. This is the one place that reads such sentences; one that is not
# known here stays a sentence.
OLD_WARNINGS = (
    ("out_of_memory", re.compile(
        r"step (?P<next_step>[\d,]+) ran out of memory \((?P<said>.*)\): it is taken again in passes of at most "
        r"(?P<after_tokens>[\d,]+) tokens instead of (?P<before_tokens>[\d,]+), at the same batch of "
        r"(?P<train_batch_size>[\d,]+)", re.DOTALL)),
    ("checkpoint_failed", re.compile(
        r"step (?P<step>\d+) could not be saved: (?P<why>.*?); (?P<last>the final model)?", re.DOTALL)),
    ("checkpoint_rejected", re.compile(r"passed over checkpoint (?P<name>[^:]+): (?P<why>.*)", re.DOTALL)))
OLD_FAILURES = (
    ("loss_not_finite", re.compile(r"the loss of step (?P<step>\d+) is not finite \((?P<loss>\S+)\)")),
    ("weights_not_finite", re.compile(r"after step (?P<step>\d+) (?P<weights>\d+) weights are not finite, (?P<first>\S+) the")),
    ("does_not_fit", re.compile(r"does not fit the memory|ran out of memory")))
OLD_STOP = re.compile(r"stopped \((?P<signal>\w+)\)")
OLD_COUNTS = {"next_step", "step", "after_tokens", "before_tokens", "train_batch_size", "weights"}


def _upgraded(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the line with today's fields; a line of this version is returned as it is."""
    message = str(line.get("message") or "")
    if line["event"] == "warning" and "about" not in line and (found := _first(OLD_WARNINGS, message)):
        about, fields = found
        step = fields.pop("next_step", None)
        return {"event": "warning", "about": about, "time": line.get("time", 0.0), **fields,
                **({} if step is None else {"step": step - 1}),
                **({"last": fields.get("last") is not None} if about == "checkpoint_failed" else {})}
    if line["event"] == "end":
        stopped = OLD_STOP.fullmatch(str(line.get("reason")))
        failure = _first(OLD_FAILURES, message) if line.get("reason") == "failed" and "error" not in line else None
        return {**line, **({"reason": "stopped", "signal": stopped["signal"]} if stopped else {}),
                **({"error": {"kind": failure[0], **failure[1]}} if failure else {})}
    return line


def _first(patterns: tuple[tuple[str, re.Pattern[str]], ...], message: str) -> tuple[str, dict[str, Any]] | None:
    for kind, pattern in patterns:
        if found := pattern.search(message):
            return kind, {name: int(value.replace(",", "")) if name in OLD_COUNTS and value else value
                          for name, value in found.groupdict().items()}
    return None
