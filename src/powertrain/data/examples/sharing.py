"""One source tokenised by several processes: stretches of its files go to whoever is free, and are joined in order.

What a row becomes depends on nothing but the row, so that what is stored is the same to the byte whoever did which stretch.
This process works like the others, which take a moment to start and need neither torch nor transformers. If one of them fails,
this one does its stretches again, and goes on without it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from powertrain.data.examples.part import PartWriter, Progress, Say
from powertrain.data.examples.work import ANSWER, TOLD, Stretch, Work
from powertrain.data.reading import readable
from powertrain.machine import usable_cpus

STRETCH_BYTES = 1 << 19
EACH_BYTES = 4 << 20         # of a source for each further process: less is done before it has started
MOST_FURTHER = 7             # some 100 MB each
WAITING = 2                  # stretches per process that are cut ahead of the first one that is not joined yet
# the same modules are found as here, however this process came to find them
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from powertrain.data.examples.work import main; main()"


def further_processes(files: Sequence[Path]) -> int:
    """Return how many further processes would shorten the work on these files; none for few bytes or on one core."""
    size_bytes = 0
    for path in files:
        with readable(path):
            size_bytes += path.stat().st_size
    return min(usable_cpus() - 1, size_bytes // EACH_BYTES, MOST_FURTHER) if sys.executable else 0


def write_together(folder: Path, source: str, stretches: Iterable[Stretch], work: Work, said: str, further: int,
                   say: Say) -> dict[str, Any]:
    """Write all files of a part but meta.json into `folder`, and return the content of meta.json."""
    scratch = folder / "stretches"
    scratch.mkdir()
    progress = Progress(source, say)
    waiting: deque[tuple[Path, Future[list[str]]]] = deque()
    with PartWriter(folder, work.tokenizer.vocabulary, work.schema.kind) as writer, ExitStack() as stack:
        free: SimpleQueue[Work | Other] = SimpleQueue()
        free.put(work)
        for number in range(further):
            free.put(stack.enter_context(Other(work, scratch / f"{number}.err")))
        threads = ThreadPoolExecutor(further + 1)
        stack.callback(threads.shutdown, cancel_futures=True)            # before the further processes are ended

        def join_first() -> None:
            done, failures = waiting.popleft()
            for failure in failures.result():
                say(failure)
            writer.append(done, json.loads((done / TOLD).read_bytes()))
            shutil.rmtree(done)
            progress.tell(writer)

        for number, stretch in enumerate(stretches):
            waiting.append((scratch / str(number), threads.submit(_tokenise, free, scratch / str(number), stretch)))
            if len(waiting) > WAITING * (further + 1):
                join_first()
        while waiting:
            join_first()
        meta = writer.meta(work.schema, said)
    shutil.rmtree(scratch)
    return meta


def _tokenise(free: SimpleQueue[Work | Other], folder: Path, stretch: Stretch) -> list[str]:
    """Have a free process tokenise the stretch into `folder`, another one where it fails; return one sentence per failure."""
    failures: list[str] = []
    while True:
        worker = free.get()
        try:
            worker.write(folder, stretch)
        except Ended as error:               # this process is not free again
            failures.append(str(error))
            shutil.rmtree(folder, ignore_errors=True)
            continue
        except BaseException:
            free.put(worker)                 # other threads may wait for it
            raise
        free.put(worker)
        return failures


class Ended(Exception):
    """A further process has ended before its work."""


class Other:
    """One further process. Leaving the context ends the process."""

    def __init__(self, work: Work, errors: Path):
        self.errors, self.told = errors, work.to_json()
        with errors.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-c", CODE, json.dumps(sys.path)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=file)

    def __enter__(self) -> Other:
        with suppress(BrokenPipeError):      # the process has ended, which the first stretch finds out
            self._tell(self.told)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):      # words that the process did not read any more
            self.process.communicate()

    def write(self, folder: Path, stretch: Stretch) -> None:
        """Have the process write the stretch into `folder`. Raises Ended if the process has ended before it answers."""
        assert self.process.stdout is not None
        answer = b""
        with suppress(BrokenPipeError):
            self._tell({"folder": str(folder), "path": str(stretch.path), "start": stretch.start,
                        "size_bytes": stretch.size_bytes, "line": stretch.line})
            answer = self.process.stdout.read(len(ANSWER))
        if not answer:
            raise Ended(f"one of the processes that tokenise has failed ({self._reason()}); the others do its rows")

    def _reason(self) -> str:
        status = self.process.wait()
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return signal.Signals(-status).name if status < 0 else lines[-1] if lines else f"exit status {status}"

    def _tell(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()
