"""A watch over processes that wait for each other: a process that does not get on writes down where it stands.

The watch is a thread of Python's own faulthandler, which needs no lock of the interpreter: it sees a process that hangs inside
a library. One that was frozen is seen when it goes on, by that thread or by the one that trains, whichever comes first.
"""

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

FOLDER = "stacks"                            # in the run's folder; a file for each process that did not get on
RENEWED_S = 0.5                              # renewing starts a thread, which is not worth its time at each exchange


@dataclass
class Watch:
    """Writes the stacks of this process's threads where `renew` is not called for `within_s` seconds."""

    file: TextIO
    within_s: float
    _renewed_s: float = field(init=False)
    _size: int = field(init=False)           # of the file then

    def __post_init__(self) -> None:
        self._wait()

    def renew(self) -> None:
        """Begin to wait anew."""
        if time.monotonic() - self._renewed_s >= RENEWED_S:
            self.end()
            self._wait()

    def end(self) -> None:
        """Wait no longer."""
        faulthandler.cancel_dump_traceback_later()
        if time.monotonic() - self._renewed_s >= self.within_s and self._file_size() == self._size:
            faulthandler.dump_traceback(self.file)

    def _wait(self) -> None:
        self._renewed_s, self._size = time.monotonic(), self._file_size()
        faulthandler.dump_traceback_later(self.within_s, file=self.file)

    def _file_size(self) -> int:
        return os.fstat(self.file.fileno()).st_size


@contextlib.contextmanager
def watching(run: Path, rank: int, within_s: float) -> Iterator[Watch]:
    """Watch this process inside. Its stacks go to stacks/rank-N.txt in the run's folder, a file that stays only if needed."""
    path = run / FOLDER / f"rank-{rank}.txt"
    path.parent.mkdir(exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        watch, before = Watch(file, within_s), file.tell()
        try:
            yield watch
        finally:
            watch.end()
        file.truncate(before)                # slow, and not hanging: all have come to the end
    if not path.stat().st_size:
        path.unlink()
        with contextlib.suppress(OSError):   # other processes have theirs in it
            path.parent.rmdir()
