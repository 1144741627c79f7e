"""The lines of a log: steps as rows of numbers, the others as they are. Many are read in several processes."""

import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic_core import from_json

from powertrain.machine import usable_cpus
from powertrain.web.places import opened

FIELDS = ("step", "time", "loss", "learning_rate", "grad_norm", "seconds", "tokens", "real_tokens")
PARTS = ("data", "copy", "forward", "backward", "communication", "optimizer")
METRICS = ("rewards_accuracies", "rewards_margins", "rewards_chosen", "rewards_rejected")     # of compared answers
COLUMNS = (*FIELDS, *PARTS, *METRICS)
ROW_BYTES = 8 * len(COLUMNS)
NO_STEPS = np.empty((0, len(COLUMNS)))
DAMAGED = "not an event"    # in the place of a line
STEP = b'{"event": "step"'
BLOCK_BYTES = 1 << 16        # of the log that are read at a time: so few objects that Python looks for no garbage among them
READ_APART_BYTES = 1 << 26   # for each process that reads them
MOST_READERS = 4             # processes
NOT_APART = (OSError, NotImplementedError, BrokenProcessPool)    # no process starts, it was killed, the path leads elsewhere
CHUNK_STEPS = 1 << 14        # that a row of the database holds where many are new


class Chunk:
    """What a log says from byte `begin` to `end`: steps as rows, and other lines, each with the number of rows before it."""

    def __init__(self, begin: int):
        self.begin, self.end, self.count = begin, begin, 0
        self.others = list[tuple[int, str]]()
        self._steps = [NO_STEPS]

    def add(self, steps: np.ndarray, others: Sequence[tuple[int, str]]) -> None:
        self.others += [(self.count + place, line) for place, line in others]
        self._steps.append(steps)
        self.count += len(steps)

    @property
    def steps(self) -> np.ndarray:
        """Return them as one array, made once."""
        if len(self._steps) > 1:
            self._steps = [np.concatenate(self._steps)]
        return self._steps[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": [self.steps]}        # sent to another process as one array


def read_chunks(path: Path, log: BinaryIO, begin: int) -> Iterator[Chunk]:
    """Yield what is new in the log at `path` from byte `begin` on, in order. Much of it is read in several processes."""
    status = os.fstat(log.fileno())
    first, *others = _ranges(log, begin, status.st_size)
    pool: ProcessPoolExecutor | None = None
    with ExitStack() as stack:
        apart = list[Future[list[Chunk]]]()
        with suppress(*NOT_APART):
            for part in others:
                pool = pool or stack.enter_context(ProcessPoolExecutor(len(others), multiprocessing.get_context("spawn")))
                apart.append(pool.submit(_read_apart, path, (status.st_dev, status.st_ino), *part))
        yield from _read_range(log, *first)
        for number, part in enumerate(others):
            chunks: Iterable[Chunk] | None = None
            with suppress(*NOT_APART):
                chunks = apart[number].result() if number < len(apart) else None
            yield from _read_range(log, *part) if chunks is None else chunks


def _ranges(log: BinaryIO, begin: int, size: int) -> list[tuple[int, int]]:
    """Return the bytes from `begin` on in parts that end with a line: as many as there are processes to read them."""
    count = max(1, min(usable_cpus(), MOST_READERS, (size - begin) // READ_APART_BYTES))
    ends = list[int]()
    for number in range(1, count):
        log.seek(begin + (size - begin) * number // count)
        log.readline()
        ends.append(log.tell())
    return list(itertools.pairwise([begin, *ends, size]))


def _read_apart(path: Path, place: tuple[int, int], begin: int, end: int) -> list[Chunk]:
    """Read bytes of a log in a process of its own. Raises OSError where the path no longer leads to that file."""
    with opened(path) as log:
        status = os.fstat(log.fileno())
        if (status.st_dev, status.st_ino) != place:
            raise OSError(f"{path} is another file by now")
        return list(_read_range(log, begin, end))


def _read_range(log: BinaryIO, begin: int, end: int) -> Iterator[Chunk]:
    """Yield what the lines say that begin between these bytes, at least CHUNK_STEPS steps at a time."""
    chunk = Chunk(begin)
    for lines in blocks(log, begin, end):
        chunk.add(*read_lines(lines))
        chunk.end += sum(map(len, lines))
        if chunk.count >= CHUNK_STEPS:
            yield chunk
            chunk = Chunk(chunk.end)
    if chunk.end > chunk.begin:
        yield chunk


def blocks(log: BinaryIO, begin: int, end: int) -> Iterator[list[bytes]]:
    """Yield the whole lines that begin between these bytes. One without an end is still being written."""
    log.seek(begin)
    while begin < end and (lines := log.readlines(min(BLOCK_BYTES, end - begin))):
        if begin + sum(map(len, lines[:-1])) >= end:         # readlines may give one more
            lines.pop()
        begin += sum(map(len, lines))
        torn = not lines[-1].endswith(b"\n")
        if whole := lines[:-1] if torn else lines:
            yield whole
        if torn:                             # it may be complete by now, and the log goes on in its middle
            return


def read_lines(lines: Sequence[bytes]) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Return the steps of these lines as rows, and the other lines, each with the number of rows before it."""
    try:                                     # in one piece, and by pydantic's parser, which is the faster one
        steps = from_json(b"[" + b",".join(line for line in lines if line.startswith(STEP)) + b"]", cache_strings="keys")
        rows = _rows(steps)
        at = [number for number, line in enumerate(lines) if not line.startswith(STEP)]
        others = [(place - before, lines[place].decode()) for before, place in enumerate(at)]
        if all(isinstance(json.loads(line), dict) for _, line in others):
            return rows, others
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return _read_singly(lines)


def _rows(steps: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return steps as rows. They are read column by column, in a fraction of the time of row by row."""
    parts, metrics = ([step.get(name) or {} for step in steps] for name in ("parts", "metrics"))
    rows, column = np.empty((len(steps), len(COLUMNS))), 0
    for names, found, absent in ((FIELDS, steps, 0.0), (PARTS, parts, 0.0), (METRICS, metrics, math.nan)):
        some = any(found)                    # few runs have metrics
        for name in names:
            try:
                rows[:, column] = np.fromiter(map(itemgetter(name), found), np.float64, len(found)) if some else absent
            except KeyError:                 # in some steps, or none
                rows[:, column] = np.fromiter((one.get(name, absent) for one in found), np.float64, len(found))
            column += 1
    return rows


def _read_singly(lines: Sequence[bytes]) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Do the same for lines of which one is damaged: in its place stands what is wrong with it."""
    rows, others = list[np.ndarray](), list[tuple[int, str]]()
    for line in lines:
        try:
            found = json.loads(line)
            if line.startswith(STEP):
                rows.append(_rows([found]))
            elif isinstance(found, dict):
                others.append((len(rows), line.decode()))
            else:
                raise ValueError("it is no object")
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            others.append((len(rows), json.dumps({DAMAGED: str(error)})))
    return np.concatenate([NO_STEPS, *rows]), others
