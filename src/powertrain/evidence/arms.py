"""The parent's side of an arm's process: starting, asking and ending it.

Processes are forked from a server that has imported what every arm needs and done nothing else, so that a start is
cheap and still a process, an allocator and a pool of threads of its own.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path
from typing import Any, Self

import torch

from powertrain.evidence.worker import FIRST, CannotRun, Order, Ready, serve

# torch's optimizers import its compiler; where there is CUDA nobody promises that importing that leaves CUDA alone, and a
# process forked after CUDA was looked at can never use it
PRELOADED = ["powertrain.evidence.worker", *([] if torch.version.cuda else ["torch._dynamo"])]
GRACE_S = 2.0                                # for a process that is told to end; then it is made to


class ArmProcess:
    """An arm's process that is ready to take steps. Raises CannotRun whenever the process fails."""

    def __init__(self, order: Order):
        self.arm, self._first = order.arm, Path(order.scratch, FIRST)
        self.first_step_s = 0.0              # set by the caller that asks for the very first step
        context = process_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, order), name=f"arm {order.arm.name}")
        began = time.perf_counter()
        self._process.start()
        theirs.close()
        try:
            self.ready: Ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - began

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._gone() from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(answer, CannotRun):
            answer.arm = self.arm.name
            raise answer
        return answer

    def _gone(self) -> CannotRun:
        self._process.join(GRACE_S)
        code = self._process.exitcode
        how = f"ended with code {code}" if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"
        memory = code == -signal.SIGKILL
        why = ", as Linux does when the memory is used up" if memory else ""
        return CannotRun(f"the process of the arm {self.arm.name!r} {how}{why}", arm=self.arm.name, out_of_memory=memory)

    def close(self) -> None:
        """End the process at once."""
        self._pipe.close()
        self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._first.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def process_context() -> Any:
    """Return a context that forks from a server with torch imported, or starts processes from scratch where it cannot."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
