"""What a run has written, by column: read once, kept in a file that may be deleted, and read on from where it ended.

A run of 100,000 steps opens in an instant this way. What counts is what `records.event_log.counted` says: steps that a later
continuation went back behind are left out.
"""

import contextlib
import datetime
import json
import os
import sqlite3
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from powertrain.records import WrongUse
from powertrain.records.event_log import from_line
from powertrain.records.events import End, Evaluated, Event, Resume, Rewound, Start
from powertrain.records.timeline import last_of
from powertrain.run.folder import RunFolder, RunSummary, is_being_written, state_of
from powertrain.web.log_lines import CHUNK_STEPS, COLUMNS, DAMAGED, NO_STEPS, ROW_BYTES, Chunk, blocks, read_chunks, read_lines
from powertrain.web.places import opened

LOG = "events.jsonl"
LENGTHENED_BYTES = 1 << 20   # new in a log, at most, that what is in memory is lengthened by
PROOF_BYTES = 4096           # before the end of what was read: they tell a file that was written anew
MOST_CHUNKS = 50
MOST_IN_MEMORY = 2           # runs
TABLES = """
CREATE TABLE IF NOT EXISTS read(path TEXT PRIMARY KEY, inode INTEGER, end INTEGER, proof INTEGER);
CREATE TABLE IF NOT EXISTS chunk(path TEXT, begin INTEGER, steps BLOB, others TEXT, PRIMARY KEY(path, begin));
CREATE TABLE IF NOT EXISTS summary(path TEXT PRIMARY KEY, stamp TEXT, summary TEXT);
"""


@dataclass(frozen=True, eq=False)
class Series:
    """The events of a run that count."""

    steps: np.ndarray                        # (steps, columns) float64; see COLUMNS
    others: tuple[Event, ...]                # all that are no step
    places: tuple[int, ...]                  # for each of these, how many of the rows of `steps` were written before it
    end: int                                 # bytes of events.jsonl that were read
    damaged: str = ""                        # what is said of a line that was left out

    def __getitem__(self, column: str) -> np.ndarray:
        values: np.ndarray = self.steps[:, COLUMNS.index(column)]
        return values

    def state(self, folder: RunFolder) -> str:
        """Return "running", "killed", "finished", "failed" or "stopped (SIGNAL)"."""
        ended = last_of(End, self.others)
        return state_of(self.others, written=None if ended else is_being_written(folder))

    @property
    def start(self) -> Start:
        """Return the beginning of the last session."""
        return last_of(Start, self.others) or Start(time=0.0)


NOTHING = Series(NO_STEPS, (), (), 0)


@dataclass(frozen=True)
class _Kept:
    inode: int
    proof: int
    series: Series

    def is_beginning_of(self, log: BinaryIO, status: os.stat_result) -> bool:
        return self.inode == status.st_ino and self.series.end <= status.st_size and _proof(log, self.series.end) == self.proof


@dataclass(frozen=True)
class Listed(RunSummary):
    """A line of the list of runs."""

    last_loss: float | None = None           # of the last step
    is_held_out: bool = False                # `loss` is
    damaged: str = ""                        # what is said of a line of the log that was left out


class Index:
    """The runs of one page. Any thread may ask."""

    def __init__(self, file: Path, open_log: Callable[[Path], BinaryIO] = opened):
        self.file, self.open_log = file, open_log
        self._lock = threading.RLock()
        self._kept: dict[str, _Kept] = {}
        self._connection: sqlite3.Connection | None = None           # to open it takes as long as a short run
        file.parent.mkdir(parents=True, exist_ok=True)

    def series(self, run: Path) -> Series:
        """Return what the run has written until now. A run without a log has no steps."""
        with self._lock:
            try:
                return self._series(run)
            except sqlite3.DatabaseError:    # damaged, by a full disk for example: it holds nothing that cannot be read again
                self._kept.clear()
                self.close()
                for ending in ("", "-wal", "-shm"):
                    Path(f"{self.file}{ending}").unlink(missing_ok=True)
                return self._series(run)

    def _series(self, run: Path) -> Series:
        try:
            log = self.open_log(run / LOG)
        except (OSError, WrongUse):
            return NOTHING
        with log:
            key, status = str(run), os.fstat(log.fileno())
            kept = self._kept.pop(key, None)
            if kept is not None and kept.is_beginning_of(log, status) and status.st_size - kept.series.end < LENGTHENED_BYTES:
                found = _longer(kept.series, log)
            else:
                found = self._read_and_stored(key, log, status)
            self._kept[key] = _Kept(status.st_ino, _proof(log, found.end), found)        # the last one that was asked for
            while len(self._kept) > MOST_IN_MEMORY:
                del self._kept[next(iter(self._kept))]
            return found

    def _read_and_stored(self, key: str, log: BinaryIO, status: os.stat_result) -> Series:
        """Return what the database holds of a log, after what is new in the log was put there."""
        with self._database() as database:
            row = database.execute("SELECT inode, end, proof FROM read WHERE path = ?", (key,)).fetchone()
            end = 0
            if row is not None and row[0] == status.st_ino and row[1] <= status.st_size and _proof(log, row[1]) == row[2]:
                end = row[1]
            else:
                database.execute("DELETE FROM chunk WHERE path = ?", (key,))
            everything = _stored(database, key)
            for chunk in read_chunks(Path(key) / LOG, log, end):
                _put(chunk, database, key)
                everything.add(chunk.steps, chunk.others)
                end = chunk.end
            _join(database, key)
            database.execute("INSERT OR REPLACE INTO read VALUES (?, ?, ?, ?)", (key, status.st_ino, end, _proof(log, end)))
        return _extended(NOTHING, everything.steps, everything.others, end)

    def summaries(self, runs: Sequence[Path]) -> dict[Path, Listed]:
        """Return the lines of a list for those of these runs that were read before and have not changed."""
        with self._lock, self._database() as database:
            stored = {path: (stamp, text) for path, stamp, text in database.execute("SELECT * FROM summary")}
        found = {}
        for run in runs:
            stamp, text = stored.get(str(run), ("", ""))
            if text and stamp == _stamp(run):
                known = json.loads(text)
                state = known.pop("state") or state_of((), written=is_being_written(RunFolder(run)))
                found[run] = Listed(run, state=state, **known)
        return found

    def summary(self, run: Path) -> Listed:
        """Return the run's line in a list, read anew."""
        stamp, series = _stamp(run), self.series(run)
        found = _summary(run, series)
        told = {name: value for name, value in vars(found).items() if name != "folder"}
        state = found.state if last_of(End, series.others) else ""               # "": the lock says it each time
        with self._lock, self._database() as database:
            database.execute("INSERT OR REPLACE INTO summary VALUES (?, ?, ?)", (
                str(run), stamp, json.dumps({**told, "state": state})))
        return found

    def close(self) -> None:
        """Close the file; the next question opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            self._connection = sqlite3.connect(self.file, isolation_level=None, check_same_thread=False)     # self._lock
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=OFF")       # it may be lost
            self._connection.executescript(TABLES)
        database = self._connection
        database.execute("BEGIN")
        try:
            yield database
        except BaseException:
            self.close()
            raise
        database.execute("COMMIT")


def _stamp(run: Path) -> str:
    """Return what changes with the log of a run."""
    try:
        status = os.stat(run / LOG, follow_symlinks=False)
    except OSError:
        return "no log"
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


def _summary(run: Path, series: Series) -> Listed:
    start = next((event for event in series.others if isinstance(event, Start)), None) or Start(time=0.0)
    evaluated, seconds = last_of(Evaluated, series.others), float(series["seconds"].sum())
    taken = len(series.steps)
    return Listed(
        run, start.name or run.name, series.state(RunFolder(run)), step=int(series["step"][-1]) if taken else 0,
        total_steps=start.total_steps, loss=evaluated.loss if evaluated else float(series["loss"][-1]) if taken else None,
        bits_per_byte=evaluated.bits_per_byte if evaluated else None,
        tokens_per_s=float(series["real_tokens"].sum()) / seconds if seconds else None,
        started=datetime.datetime.fromtimestamp(start.time).strftime("%Y-%m-%d %H:%M") if start.time else "", began=start.time,
        last_loss=float(series["loss"][-1]) if taken else None, is_held_out=evaluated is not None, damaged=series.damaged)


def _join(database: sqlite3.Connection, key: str) -> None:
    """Make one of the last chunks of a run that was read while it grew, if they are many."""
    large = f"SELECT COALESCE(MAX(begin), -1) FROM chunk WHERE path = :key AND LENGTH(steps) >= {CHUNK_STEPS * ROW_BYTES}"
    count, begin = database.execute(f"SELECT COUNT(*), MIN(begin) FROM chunk WHERE path = :key AND begin > ({large})",
                                    {"key": key}).fetchone()
    if count <= MOST_CHUNKS:
        return
    chunk = _stored(database, key, begin)
    database.execute("DELETE FROM chunk WHERE path = ? AND begin >= ?", (key, chunk.begin))
    _put(chunk, database, key)


def _stored(database: sqlite3.Connection, key: str, begin: int = 0) -> Chunk:
    """Return what the database holds of a log from byte `begin` on."""
    chunk = Chunk(begin)
    for blob, text in database.execute("SELECT steps, others FROM chunk WHERE path = ? AND begin >= ? ORDER BY begin",
                                       (key, begin)).fetchall():
        chunk.add(np.frombuffer(blob, dtype=np.float64).reshape(-1, len(COLUMNS)), json.loads(text))
    return chunk


def _put(chunk: Chunk, database: sqlite3.Connection, key: str) -> None:
    database.execute("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?)",
                     (key, chunk.begin, chunk.steps.tobytes(), json.dumps(chunk.others)))


def _proof(log: BinaryIO, end: int) -> int:
    log.seek(max(0, end - PROOF_BYTES))
    return zlib.crc32(log.read(min(end, PROOF_BYTES)))


def _longer(series: Series, log: BinaryIO) -> Series:
    """Return a series with what the log has behind its end."""
    for lines in blocks(log, series.end, sys.maxsize):
        steps, others = read_lines(lines)
        series = _extended(series, steps, others, series.end + sum(map(len, lines)))
    return series


def _extended(series: Series, steps: np.ndarray, lines: Sequence[tuple[int, str]], end: int) -> Series:
    """Return a series with further steps, and further lines of which each says how many of these steps are before it."""
    old = len(series.steps)
    rows = np.concatenate([series.steps, steps]) if old else steps
    counts, others, places, damaged = np.ones(len(rows), dtype=bool), [*series.others], [*series.places], series.damaged
    for place, line in ((old + place, json.loads(line)) for place, line in lines):
        try:
            if DAMAGED in line:
                raise WrongUse(line[DAMAGED])
            event = from_line(line)
        except (WrongUse, KeyError, TypeError, ValueError) as error:
            damaged = damaged or f"a line of events.jsonl is damaged and left out: {error}"
            continue
        if isinstance(event, Resume | Rewound):
            counts[:place] &= rows[:place, 0] <= event.step
            kept = [number for number, before in enumerate(others) if before.step <= event.step and not isinstance(before, End)]
            others, places = [others[number] for number in kept], [places[number] for number in kept]
        others.append(event)
        places.append(place)
    if not counts.all():
        counted = np.concatenate([[0], np.cumsum(counts)])
        rows, places = rows[counts], [int(counted[place]) for place in places]
    return Series(rows, tuple(others), tuple(places), end, damaged)
