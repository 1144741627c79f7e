"""Conversations: a process for each model, which stays warm for a while and streams what the model writes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from powertrain.records import WrongUse
from powertrain.report.words import memory

PROGRAM = (sys.executable, "-m", "powertrain")
MOST_WARM = 2                # models: a tuned one and its base
IDLE_S = 300.0
GROWS = 2.2                  # times the bytes of a model's files: 16-bit weights are computed with in 32 bits
MOST_LINE_BYTES = 1 << 20


class Talk:
    """One model's process. It answers one message at a time."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process, self.used, self.busy, self.behind = process, time.monotonic(), False, False

    def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Talks:
    """The processes of a page."""

    def __init__(self, root: Path, environment: Mapping[str, str], program: Sequence[str] = PROGRAM):
        self.root, self.environment, self.program = root, environment, program
        self._warm: dict[str, Talk] = {}

    async def ask(self, model: str, size_bytes: int, message: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Yield what the model's process prints, up to the end of its answer. Raises WrongUse where it cannot be asked now."""
        talk = await self._talk(model, size_bytes)
        assert talk.process.stdin is not None
        talk.busy = True
        try:
            if talk.behind:                  # an answer that was stopped
                async for _ in _answer(talk):
                    pass
            talk.process.stdin.write(json.dumps(message).encode() + b"\n")
            await talk.process.stdin.drain()
            talk.behind = True
            async for line in _answer(talk):
                yield line
        except (OSError, ValueError):
            talk.end()
            raise WrongUse("the model's process has ended; ask again") from None
        finally:
            if talk.behind and talk.process.returncode is None:      # nobody reads on: the answer is stopped
                with contextlib.suppress(ProcessLookupError):
                    talk.process.send_signal(signal.SIGINT)
            talk.used, talk.busy = time.monotonic(), False

    async def _talk(self, model: str, size_bytes: int) -> Talk:
        self.tend()
        talk = self._warm.get(model)
        if talk is not None and talk.process.returncode is None:
            if talk.busy:
                raise WrongUse("this model answers another message; wait for it, or stop it")
            return talk
        free = psutil.virtual_memory().available
        if size_bytes * GROWS > free:
            raise WrongUse(f"this model needs about {memory(int(size_bytes * GROWS))}, and {memory(free)} are free; end the "
                           "training that runs, or another program, first")
        idle = [name for name, other in self._warm.items() if not other.busy]
        while len(self._warm) >= MOST_WARM:
            if not idle:
                raise WrongUse(f"{MOST_WARM} models answer already; wait for one of them")
            self._warm.pop(idle.pop(0)).end()
        self._warm[model] = Talk(await asyncio.create_subprocess_exec(
            *self.program, "chat", model, "--json", "--show-prompt", cwd=self.root, env=dict(self.environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            limit=MOST_LINE_BYTES))
        return self._warm[model]

    def forget(self, model: str) -> None:
        """End a model's process, and with it its conversation."""
        if (talk := self._warm.pop(model, None)) is not None:
            talk.end()

    def tend(self, *, all_of_them: bool = False) -> None:
        """End what has ended, or was idle for long."""
        for name, talk in list(self._warm.items()):
            if all_of_them or talk.process.returncode is not None or (
                    not talk.busy and time.monotonic() - talk.used > IDLE_S):
                self.forget(name)


async def _answer(talk: Talk) -> AsyncIterator[Mapping[str, Any]]:
    """Yield the lines of one answer; the last one is the answer itself, or an error."""
    assert talk.process.stdout is not None
    while line := await talk.process.stdout.readline():
        found = json.loads(line)
        if found.get("event") in ("answer", "error"):
            talk.behind = False
        yield found
        if not talk.behind:
            return
    talk.behind = False
    yield {"event": "error", "message": "the model's process has ended; `powertrain chat` in a terminal says why"}
