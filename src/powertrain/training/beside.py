"""Work in a thread beside the training, which is done even where the system has no memory for the thread."""

import _thread
import contextlib
import threading
from collections.abc import Callable

from powertrain.records.priority import lower_thread


class Beside:
    """Work that a thread of lower priority does, or `finish` where that thread has not come to it.

    `threading.Thread.start` waits for a note of the new thread: for ever, where that thread has died because there was no
    memory for the note. Nothing waits here. The thread does not keep the process alive: call `finish`. `do` raises nothing.
    """

    def __init__(self, do: Callable[[], None]) -> None:
        self._to_do = [do]
        self.done = threading.Event()
        self._has_thread = True
        try:
            _thread.start_new_thread(self._in_thread, ())
        except RuntimeError:                 # no memory for its stack
            self._has_thread = False

    @property
    def is_running(self) -> bool:
        """Return whether to wait before `finish` is called."""
        return self._has_thread and not self.done.is_set()

    def finish(self) -> None:
        """Return once the work is done."""
        self._do()
        self.done.wait()

    def _in_thread(self) -> None:
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
            self.done.set()
