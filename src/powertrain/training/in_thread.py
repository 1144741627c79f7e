"""Work in a thread beside the training, which is done even where the system has no memory for the thread."""

import _thread
import contextlib
import weakref
from collections.abc import Callable

from powertrain.records.priority import lower_thread

LOOK_EVERY_S = 0.1           # whether a thread that is waited for still lives


class Sign:
    """Lives as long as the thread that it was given to."""


class InThread:
    """Work that a thread of lower priority does, or `finish` where that thread has not come to it.

    `threading.Thread.start` waits for a note of the new thread: for ever, where that thread has died because there was no
    memory for the note. Here nothing depends on what a thread can still do. It does not keep the process alive: call `finish`.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self._to_do = [do]
        self._working = _thread.allocate_lock()
        self._working.acquire()
        self._ends = self._working.release   # made beforehand: calling it takes no memory
        sign = Sign()
        self._sign = weakref.ref(sign)
        with contextlib.suppress(RuntimeError, MemoryError):         # no memory for its stack
            _thread.start_new_thread(self._in_thread, (sign,))

    @property
    def is_running(self) -> bool:
        """Return whether the thread still works, or has yet to begin."""
        return self._sign() is not None and self._working.locked()

    def finish(self) -> None:
        """Return once the work is done, or the thread that had begun it is gone."""
        self._do()
        while not self._working.acquire(timeout=LOOK_EVERY_S):
            if self._sign() is None:
                return
        self._ends()

    def _in_thread(self, sign: Sign) -> None:
        with contextlib.suppress(MemoryError):
            lower_thread()
            self._do()

    def _do(self) -> None:
        try:
            do = self._to_do.pop()           # the first of two threads gets it
        except IndexError:
            return
        try:
            do()
        finally:
            self._ends()
