"""One source tokenised by several processes: stretches of its files go to whoever is free, and are joined in order.

What a row becomes depends on nothing but the row, so that what is stored is the same to the byte whoever did which stretch.
This process works like the others, which take a moment to start and need neither torch nor transformers. If one of them fails,
this one does its stretches again, and goes on without it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from powertrain.data.examples.part import PartWriter, Progress, Say
from powertrain.data.examples.work import TOLD, Stretch, Work
from powertrain.data.reading import readable
from powertrain.machine import usable_cpus

STRETCH_BYTES = 1 << 19
EACH_BYTES = 4 << 20         # of a source for each further process: less is done before it has started
MOST_FURTHER = 7             # some 100 MB each
WAITING = 2                  # stretches that a process has been given, so that it never waits for the next one
# the same modules are found as here, however this process came to find them
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from powertrain.data.examples.work import main; main()"


def further_processes(files: Sequence[Path]) -> int:
    """How many would shorten the work on these files; none for few bytes, on one core, or where pipes cannot be waited for."""
    size_bytes = 0
    for path in files:
        with readable(path):
            size_bytes += path.stat().st_size
    able = os.name == "posix" and bool(sys.executable)
    return min(usable_cpus() - 1, size_bytes // EACH_BYTES, MOST_FURTHER) if able else 0


def write_together(folder: Path, source: str, stretches: Iterable[Stretch], work: Work, said: str, further: int,
                   say: Say) -> dict[str, Any]:
    """As `write_part`: writes all but meta.json into `folder`, and returns what goes there."""
    scratch = folder / "stretches"
    scratch.mkdir()
    progress = Progress(source, say)
    with (PartWriter(folder, work.tokenizer.vocabulary, work.schema.kind) as writer,
          Crew(work, further, scratch, say) as crew):
        joined = 0
        for given, stretch in enumerate(stretches, 1):
            crew.do(scratch / str(given - 1), stretch)
            joined = _join(writer, scratch, joined, given, crew)
            progress.tell(writer)
        crew.finish()
        _join(writer, scratch, joined, given, crew)
        meta = writer.meta(work.schema, said)
    shutil.rmtree(scratch)
    return meta


def _join(writer: PartWriter, scratch: Path, first: int, stop: int, crew: Crew) -> int:
    """Appends the stretches from `first` on that are done, and returns the first that is not."""
    while first < stop and (folder := scratch / str(first)) not in crew.undone:
        writer.append(folder, json.loads((folder / TOLD).read_bytes()))
        shutil.rmtree(folder)
        first += 1
    return first


class Crew:
    """The further processes, and this one."""

    def __init__(self, work: Work, further: int, scratch: Path, say: Say):
        self.work, self.say, self.undone = work, say, set[Path]()
        with ExitStack() as stack:
            self.others = [stack.enter_context(Other(work, scratch / f"{number}.err")) for number in range(further)]
            self.stack = stack.pop_all()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def do(self, folder: Path, stretch: Stretch) -> None:
        """By who has the least to do; by this process if all have enough."""
        self._hear(0)
        self.undone.add(folder)
        free = min(self.others, key=lambda other: len(other.waiting), default=None)
        if free is not None and len(free.waiting) < WAITING:
            free.give(folder, stretch)
        else:
            self._do_here(folder, stretch)

    def finish(self) -> None:
        while self.undone:
            self._hear(None)

    def _do_here(self, folder: Path, stretch: Stretch) -> None:
        shutil.rmtree(folder, ignore_errors=True)            # what one that failed has left of it
        self.work.write(folder, stretch)
        self.undone.discard(folder)

    def _hear(self, wait_s: float | None) -> None:
        """What has become of the others' stretches; `wait_s` is None to wait for an answer."""
        ready, _, _ = select.select(self.others, [], [], wait_s)
        for other in ready:
            answers = other.answers()
            self.undone -= {other.waiting.popleft()[0] for _ in range(answers)}
            if not answers:
                self.others.remove(other)
                self.say(other.why())
                for folder, stretch in other.waiting:
                    self._do_here(folder, stretch)


class Other:
    """One further process: it has ended when this is left."""

    def __init__(self, work: Work, errors: Path):
        self.errors, self.waiting = errors, deque[tuple[Path, Stretch]]()
        with errors.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-c", CODE, json.dumps(sys.path)], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=file)
        self._tell(work.to_json())

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):          # words that it did not take any more
                pipe.close()

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, folder: Path, stretch: Stretch) -> None:
        self.waiting.append((folder, stretch))
        self._tell({"folder": str(folder), "path": str(stretch.path), "start": stretch.start,
                    "size_bytes": stretch.size_bytes, "line": stretch.line})

    def answers(self) -> int:
        """How many stretches it has done since; none if it has ended."""
        return len(os.read(self.fileno(), 1 << 10))

    def why(self) -> str:
        """One sentence, after it has ended."""
        status = self.process.wait()
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = signal.Signals(-status).name if status < 0 else lines[-1] if lines else f"exit status {status}"
        return f"one of the processes that tokenise has failed ({reason}); the others do its rows"

    def _tell(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):      # it has ended, which is heard where its answers are
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()
