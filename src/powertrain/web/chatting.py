"""Conversations: a process for each model, which stays warm for a while and streams what the model writes.

A process holds one conversation. It ends with its standard input, and so with the page, however the page ends.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.machine import usable_memory
from powertrain.records import WrongUse
from powertrain.report.words import memory

PROGRAM = (sys.executable, "-m", "powertrain")
MOST_WARM = 2                # models: a tuned one and its base
IDLE_S = 300.0
STOP_S = 10.0                # that a process has to stop an answer
AGAIN_S = 2.0                # after which the interrupt is sent again: Python loses one that comes within a destructor
GROWS = 2.2                  # times the bytes of a model's files: 16-bit weights are computed with in 32 bits
MOST_LINE_BYTES = 1 << 20
ENDED = {"event": "error", "message": "the model's process has ended, as it does where memory runs out; `powertrain chat` in a "
                                      "terminal says why"}


@dataclass(frozen=True)
class Model:
    name: str                                # as a command takes it
    size_bytes: int = 0                      # of its weights, with its base's; 0 for one on the hub
    changed_ns: int = 0                      # when the weights were written

    @property
    def memory_bytes(self) -> int:
        return int(self.size_bytes * GROWS)


class Talk:
    """One model's process. It answers one message at a time."""

    def __init__(self, process: asyncio.subprocess.Process, model: Model):
        self.process, self.model = process, model
        self.used, self.busy, self.is_loaded = time.monotonic(), False, False
        self.conversation = ""               # whose earlier messages it knows
        self.stopping: asyncio.Task[None] | None = None

    async def say(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        await self.process.stdin.drain()

    async def answer(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the lines of one answer; the last one is the answer itself, or an error."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.is_loaded = True
            found = json.loads(line)
            if "exit_code" in found:         # its last words
                await self.process.wait()
            yield found
            if found.get("event") in ("answer", "error"):
                return
        await self.process.wait()
        yield ENDED

    async def stop(self) -> None:
        """Let the process give up its answer, or end the process where it does not."""
        until = time.monotonic() + STOP_S
        while time.monotonic() < until:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(min(AGAIN_S, STOP_S)):
                    async for _ in self.answer():
                        pass
                return
            except TimeoutError:
                continue
            except ValueError:
                break
        await self.end()

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()


class Talks:
    """The processes of a page."""

    def __init__(self, root: Path, environment: Mapping[str, str], program: Sequence[str] = PROGRAM):
        self.root, self.environment, self.program = root, environment, program
        self._warm: dict[str, Talk] = {}
        self._turn = asyncio.Lock()          # two messages at once start one process

    async def ask(self, model: Model, message: Mapping[str, Any], conversation: str = "",
                  turn: int = 0) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield what the model's process prints, up to the end of its answer. Raises WrongUse where it cannot be asked now.

        `turn` counts the messages of a conversation. Where the process does not know the earlier ones, a line says so.
        """
        async with self._turn:
            talk = await self._talk(model)
            talk.busy = True
        is_whole = False
        try:
            is_new = talk.conversation != conversation
            talk.conversation = conversation
            await talk.say({**message, "reset": is_new})         # before anything is told: whoever asked may be gone then
            if is_new and turn:
                yield {"event": "forgotten"}
            async for line in talk.answer():
                is_whole = line.get("event") in ("answer", "error")
                yield line
        except (OSError, ValueError):
            await talk.end()
            raise WrongUse(f"{ENDED['message']}; ask again to start it anew") from None
        finally:
            if not is_whole:                 # nobody reads on
                talk.stopping = asyncio.create_task(talk.stop())
            talk.used, talk.busy = time.monotonic(), False

    async def _talk(self, model: Model) -> Talk:
        """Return the model's process: the one that is warm, or a new one if it finds room."""
        talk = self._warm.get(model.name)
        if talk is not None and talk.busy:
            raise WrongUse("this model answers another message; wait for it, or stop it")
        if talk is not None and talk.stopping is not None:
            await asyncio.wait({talk.stopping})
        if talk is not None and talk.process.returncode is None and talk.model == model:
            return talk
        await self.forget(model.name)        # its weights were written anew, or it has ended
        while len(self._warm) >= MOST_WARM:
            idle = {name: other.used for name, other in self._warm.items() if not other.busy}
            if not idle:
                raise WrongUse(f"{MOST_WARM} models answer already; wait for one of them")
            await self._warm.pop(min(idle, key=lambda name: idle[name])).end()
        # what is being loaded is not in use yet
        free = usable_memory()[1] - sum(other.model.memory_bytes for other in self._warm.values()
                                                       if not other.is_loaded)
        if model.memory_bytes > free:
            raise WrongUse(f"this model needs about {memory(model.memory_bytes)}, and {memory(max(0, free))} are free; stop "
                           "the training that runs, or end another program, first")
        self._warm[model.name] = Talk(await asyncio.create_subprocess_exec(
            *self.program, "chat", model.name, "--json", "--show-prompt", cwd=self.root, env=dict(self.environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            limit=MOST_LINE_BYTES), model)
        return self._warm[model.name]

    async def forget(self, name: str) -> None:
        """End a model's process, and with it its conversation."""
        if (talk := self._warm.pop(name, None)) is not None:
            await talk.end()

    async def tend(self, *, all_of_them: bool = False) -> None:
        """End what was idle for long."""
        for name, talk in list(self._warm.items()):
            if all_of_them or (not talk.busy and time.monotonic() - talk.used > IDLE_S):
                await self.forget(name)
