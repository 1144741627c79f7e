"""Ctrl-C and SIGTERM: the first asks the run to finish its step and save, a second one exits at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Interrupt:
    requested: str | None = None             # name of the signal that asked the run to stop


@contextmanager
def listen() -> Iterator[Interrupt]:
    """Inside, a signal is noted instead of raised. Restores the old handlers."""
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            os._exit(128 + number)           # now: no clean-up that could hang; checkpoints are whole at any time
        interrupt.requested = signal.Signals(number).name

    old = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
