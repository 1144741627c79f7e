"""A peer's trainer that takes optimizer steps when it is told to. For the peer's interpreter: standard library only.

Requests are lines of JSON on stdin, {"untimed": 1, "steps": 5}; each is answered by one line, on what stdout was when this
was made. What the trainer itself prints goes nowhere. Tell it of every step that is done, and of what went into it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any


class Steps:
    """One trainer's steps. `begin` before the first; then `count` for every pass and `done` after every step."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        self._steps = 0                      # done since the start
        self._clear()

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._tokens = {"trained_tokens": 0, "real_tokens": 0, "padding_tokens": 0}

    def begin(self) -> None:
        """The trainer is ready for its first step."""
        self._answer({"ready": True})
        self._wait()

    def already(self, loss: float, grad_norm: float) -> None:
        """One step was over before anything could be asked."""
        self._steps += 1
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def count(self, *, trained: int, real: int, padding: int) -> None:
        """What one forward and backward pass reads."""
        if self._timed is not None:
            self._tokens["trained_tokens"] += trained
            self._tokens["real_tokens"] += real
            self._tokens["padding_tokens"] += padding

    def done(self, loss: float, grad_norm: float, peak_bytes: int | None = None) -> None:
        """One optimizer step is finished. `peak_bytes`: of a GPU; without it what is resident counts."""
        self._steps += 1
        self._losses.append(loss)
        self._norms.append(grad_norm)
        if self._untimed:
            self._untimed -= 1
            if not self._untimed:
                self._start()
            return
        self._left -= 1
        if not self._left:
            self._answer({"first_step": self._steps - self._asked + 1, "steps": self._asked,
                          "seconds": time.perf_counter() - (self._timed or 0), **self._tokens,
                          "losses": self._losses, "grad_norms": self._norms,
                          "peak_bytes": peak_bytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
            self._wait()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            os._exit(0)                      # nobody asks any more
        request: dict[str, Any] = json.loads(line)
        self._clear()
        self._untimed, self._left = request["untimed"], request["steps"]
        self._asked, self._timed = self._left, None
        if not self._untimed:
            self._start()

    def _start(self) -> None:
        self._timed: float | None = time.perf_counter()

    def _answer(self, value: dict[str, Any]) -> None:
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()
