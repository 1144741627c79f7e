"""What a run has written, by column: read once, kept in a file that may be deleted, and read on from where it ended.

A run of 100,000 steps opens in an instant this way. What counts is what `records.event_log.counted` says: steps that a later
continuation went back behind are left out.
"""

import contextlib
import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from powertrain.records import WrongUse
from powertrain.records.event_log import from_line
from powertrain.records.events import End, Event, Resume, Rewound, Start
from powertrain.records.timeline import last_of
from powertrain.run.folder import RunFolder, RunSummary, is_being_written, state_of
from powertrain.web.places import opened

FIELDS = ("step", "time", "loss", "learning_rate", "grad_norm", "seconds", "tokens", "real_tokens")
PARTS = ("data", "copy", "forward", "backward", "communication", "optimizer")
COLUMNS = (*FIELDS, *PARTS)
STEP = b'{"event": "step"'
BLOCK_BYTES = 8 << 20        # of the log that are read at a time
PROOF_BYTES = 4096           # before the end of what was read: they tell a file that was written anew
MOST_CHUNKS = 50
MOST_IN_MEMORY = 2           # runs
TABLES = """
CREATE TABLE IF NOT EXISTS read(path TEXT PRIMARY KEY, inode INTEGER, end INTEGER, proof INTEGER, damaged TEXT);
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

    def start(self) -> Start:
        return last_of(Start, self.others) or Start(time=0.0)


class Index:
    """The runs of one page. Any thread may ask."""

    def __init__(self, file: Path):
        self.file = file
        self._lock = threading.RLock()
        self._kept: dict[str, Series] = {}
        file.parent.mkdir(parents=True, exist_ok=True)

    def series(self, run: Path) -> Series:
        """Return what the run has written until now. A run without a log has no steps."""
        with self._lock:
            try:
                return self._series(run)
            except sqlite3.DatabaseError:    # damaged, by a full disk for example: it holds nothing that cannot be read again
                self._kept.clear()
                for ending in ("", "-wal", "-shm"):
                    Path(f"{self.file}{ending}").unlink(missing_ok=True)
                return self._series(run)

    def _series(self, run: Path) -> Series:
        try:
            log = opened(run / "events.jsonl")
        except OSError:
            return Series(np.empty((0, len(COLUMNS))), (), (), 0)
        with log, self._database() as database:
            key, status = str(run), os.fstat(log.fileno())
            row = database.execute("SELECT inode, end, proof, damaged FROM read WHERE path = ?", (key,)).fetchone()
            begin, damaged = (row[1], row[3]) if row is not None else (0, "")
            if row is not None and (row[0] != status.st_ino or status.st_size < begin or _proof(log, begin) != row[2]):
                begin, damaged = 0, ""
            if not begin:
                database.execute("DELETE FROM chunk WHERE path = ?", (key,))
                self._kept.pop(key, None)
            kept = self._kept.get(key)
            end = begin
            for lines in _blocks(log, begin):
                steps, others, problem = _read(lines)
                database.execute("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?)",
                                 (key, end, steps.tobytes(), json.dumps(others)))
                end += sum(map(len, lines))
                damaged = problem or damaged
            if database.execute("SELECT COUNT(*) FROM chunk WHERE path = ?", (key,)).fetchone()[0] > MOST_CHUNKS:
                _join(database, key)
            if end != begin or row is None or not begin:
                database.execute("INSERT OR REPLACE INTO read VALUES (?, ?, ?, ?, ?)",
                                 (key, status.st_ino, end, _proof(log, end), damaged))
            if kept is None or kept.end != end:
                kept = _counting(database.execute("SELECT steps, others FROM chunk WHERE path = ? ORDER BY begin", (key,)),
                                 end, damaged)
                self._kept[key] = kept
                while len(self._kept) > MOST_IN_MEMORY:
                    del self._kept[next(iter(self._kept))]
            return kept

    def summary(self, run: Path, *, anew: bool = True) -> RunSummary | None:
        """Return the run's line in a list. Where it would have to be read and is not to be read `anew`, None."""
        folder = RunFolder(run)
        try:
            status = os.stat(folder.events, follow_symlinks=False)
            stamp = f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
        except OSError:
            stamp = ""
        with self._lock, self._database() as database:
            row = database.execute("SELECT summary FROM summary WHERE path = ? AND stamp = ?", (str(run), stamp)).fetchone()
        if row is not None:
            known = json.loads(row[0])
            state = known.pop("state") or state_of((), written=is_being_written(folder))
            return RunSummary(run, state=state, **known)
        if not anew:
            return None
        series = self.series(run)
        found = _summary(run, series)
        ended = last_of(End, series.others)
        told = {name: value for name, value in vars(found).items() if name != "folder"}
        with self._lock, self._database() as database:
            database.execute("INSERT OR REPLACE INTO summary VALUES (?, ?, ?)", (
                str(run), stamp, json.dumps({**told, "state": found.state if ended else ""})))
        return found

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self.file, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=OFF")               # it may be lost
            database.executescript(TABLES)
            database.execute("BEGIN")
            yield database
            database.execute("COMMIT")
        finally:
            database.close()


def _summary(run: Path, series: Series) -> RunSummary:
    import datetime

    from powertrain.records.events import Evaluated

    start = next((event for event in series.others if isinstance(event, Start)), None) or Start(time=0.0)
    evaluated, seconds = last_of(Evaluated, series.others), float(series["seconds"].sum())
    taken = len(series.steps)
    return RunSummary(
        run, start.name or run.name, series.state(RunFolder(run)), step=int(series["step"][-1]) if taken else 0,
        total_steps=start.total_steps, loss=evaluated.loss if evaluated else float(series["loss"][-1]) if taken else None,
        bits_per_byte=evaluated.bits_per_byte if evaluated else None,
        tokens_per_s=float(series["real_tokens"].sum()) / seconds if seconds else None,
        started=datetime.datetime.fromtimestamp(start.time).strftime("%Y-%m-%d %H:%M") if start.time else "", began=start.time)


def _join(database: sqlite3.Connection, key: str) -> None:
    """Make one of the many chunks of a run that was read while it grew."""
    blobs, others, before = list[bytes](), list[tuple[int, str]](), 0
    for blob, text in database.execute("SELECT steps, others FROM chunk WHERE path = ? ORDER BY begin", (key,)):
        others += [(before + place, line) for place, line in json.loads(text)]
        blobs.append(blob)
        before += len(blob) // (8 * len(COLUMNS))
    database.execute("DELETE FROM chunk WHERE path = ?", (key,))
    database.execute("INSERT INTO chunk VALUES (?, 0, ?, ?)", (key, b"".join(blobs), json.dumps(others)))


def _proof(log: BinaryIO, end: int) -> int:
    log.seek(max(0, end - PROOF_BYTES))
    return zlib.crc32(log.read(min(end, PROOF_BYTES)))


def _blocks(log: BinaryIO, begin: int) -> Iterator[list[bytes]]:
    """Yield the whole lines from `begin` on. One without an end is still being written."""
    log.seek(begin)
    while lines := log.readlines(BLOCK_BYTES):
        if not lines[-1].endswith(b"\n"):
            lines.pop()
        if lines:
            yield lines


def _read(lines: Sequence[bytes]) -> tuple[np.ndarray, list[tuple[int, str]], str]:
    """Return the steps of these lines as rows, the other lines each with the number of rows before it, and a problem."""
    rows, others, problem = list[list[float]](), list[tuple[int, str]](), ""
    steps = [line for line in lines if line.startswith(STEP)]
    try:
        read = iter(json.loads(b"[" + b",".join(steps) + b"]"))
    except ValueError:                       # one of them is damaged
        read = None
    for line in lines:
        try:
            if not line.startswith(STEP):
                if not isinstance(json.loads(line), dict):
                    raise ValueError("it is no object")
                others.append((len(rows), line.decode()))
                continue
            found = json.loads(line) if read is None else next(read)
            parts = found.get("parts") or {}
            rows.append([*(float(found.get(name, 0.0)) for name in FIELDS), *(float(parts.get(name, 0.0)) for name in PARTS)])
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            problem = f"a line of events.jsonl is damaged and left out ({error})"
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(COLUMNS)), others, problem


def _counting(chunks: Iterator[tuple[bytes, str]], end: int, damaged: str) -> Series:
    """Return what counts of all that was written."""
    blocks, others, places, before = [], list[Event](), list[int](), 0
    lines: list[tuple[int, Mapping[str, Any]]] = []
    for blob, text in chunks:
        block = np.frombuffer(blob, dtype=np.float64).reshape(-1, len(COLUMNS))
        lines += [(before + place, json.loads(line)) for place, line in json.loads(text)]
        blocks.append(block)
        before += len(block)
    steps = np.concatenate(blocks) if blocks else np.empty((0, len(COLUMNS)))
    counts = np.ones(len(steps), dtype=bool)
    for place, line in lines:
        try:
            event = from_line(line)
        except (WrongUse, KeyError, TypeError, ValueError) as error:
            damaged = damaged or f"a line of events.jsonl is damaged and left out ({error})"
            continue
        if isinstance(event, Resume | Rewound):
            counts[:place] &= steps[:place, 0] <= event.step
            kept = [number for number, old in enumerate(others) if old.step <= event.step and not isinstance(old, End)]
            others, places = [others[number] for number in kept], [places[number] for number in kept]
        others.append(event)
        places.append(place)
    counted = np.concatenate([[0], np.cumsum(counts)])
    return Series(steps[counts], tuple(others), tuple(int(counted[place]) for place in places), end, damaged)
