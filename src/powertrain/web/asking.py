"""Quick questions, such as what a plan would be: answered by one process that stays warm, the newest question first."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse

PROGRAM = (sys.executable, "-m", "powertrain", "answer")
PATIENCE_S = 8.0             # so long a question waits for an older one on its topic; then the process is started anew
MOST_S = 600.0
MOST_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Answer:
    code: int
    lines: tuple[dict[str, Any], ...]        # of JSON, as the command printed them

    @property
    def problem(self) -> str:
        """Return why there is no answer, or "". What was asked stood in a form, whatever the command takes it for."""
        error = next((line for line in self.lines if line.get("event") == "error"), None)
        if error is not None:
            return str(error["message"]).removeprefix("command line: ")
        is_answer = self.code in (0, 4, 5)
        return "" if is_answer else "powertrain could not answer this; the terminal that runs `powertrain ui` says why"

    def event(self, kind: str) -> dict[str, Any]:
        """Return the line of this kind. Raises WrongUse with the problem where there is none."""
        found = next((line for line in self.lines if line.get("event") == kind), None)
        if found is None:
            raise WrongUse(self.problem or f"powertrain did not answer with a {kind}")
        return found


class Superseded(Exception):
    """A newer question on the same topic came while this one waited."""


class Asking:
    """The process, which is started when something is asked first."""

    def __init__(self, root: Path, environment: Mapping[str, str], program: Sequence[str] = PROGRAM,
                 patience_s: float = PATIENCE_S):
        self.root, self.environment, self.program, self.patience_s = root, environment, program, patience_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._newest: dict[str, int] = {}
        self._asked = ""                     # the topic of the question that is being answered

    async def ask(self, words: Sequence[str], topic: str = "") -> Answer:
        """Return what `powertrain WORDS --json` answers. Of questions on one topic only the newest is answered.

        Raises Superseded where a newer one came, and WrongUse where the process cannot answer.
        """
        mine = self._newest[topic] = self._newest.get(topic, 0) + 1
        try:
            await asyncio.wait_for(self._turn.acquire(), self.patience_s if topic else MOST_S)
        except TimeoutError:
            if self._newest[topic] != mine:
                raise Superseded from None
            if self._asked == topic:
                self.end()                   # whoever waits for the older answer is told
            await self._turn.acquire()
        self._asked = topic
        try:
            if topic and self._newest[topic] != mine:
                raise Superseded
            return await self._answer(words)
        finally:
            self._turn.release()

    async def _answer(self, words: Sequence[str]) -> Answer:
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(list(words)).encode() + b"\n")
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), MOST_S)
            found = json.loads(line)
        except (TimeoutError, ValueError, OSError):
            self.end()
            raise WrongUse("the process that answers has ended, or took too long; ask again") from None
        except asyncio.CancelledError:       # its answer would be taken for the next question's
            self.end()
            raise
        return Answer(found["code"], tuple(json.loads(one) for one in found["lines"] if one.startswith("{")))

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self.program, cwd=self.root, env=dict(self.environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True, limit=MOST_LINE_BYTES)
        return self._process

    def end(self) -> None:
        """End the process; the next question starts another one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None
