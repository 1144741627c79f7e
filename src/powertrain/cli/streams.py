"""Standard output and standard error whose readers may be gone, or whose disk may be full."""

import os
from collections.abc import Callable
from typing import Any

FAILED = 1


class OutputGone(Exception):
    """Standard output takes nothing any more: its reader is gone (`| head`), or its disk is full."""

    def __init__(self, error: OSError):
        super().__init__(f"standard output cannot be written ({error.strerror}); send it to another file")
        self.by_reader = isinstance(error, BrokenPipeError)


class Stream:
    """A standard stream that fails once: what is written to it after an error is dropped. Standard error fails in silence."""

    def __init__(self, stream: Any, *, silent: bool):
        self._stream, self._silent = stream, silent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._guarded(self._stream.write, text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, call: Callable[..., Any], *arguments: str) -> Any:
        try:
            return call(*arguments)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())     # or Python's own end would fail too
            if not self._silent:
                raise OutputGone(error) from None
