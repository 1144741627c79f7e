"""Builds layer.c, names what it does, and reads its log."""

from __future__ import annotations

import errno
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("layer.c")
COUNT, KILL, REFUSE, SIGNAL, JUMP = range(5)             # as in layer.c
HEAD = struct.Struct("=cxxxxxxxQQII")                    # its struct record
DAY_S = 86_400


@dataclass(frozen=True)
class Kind:
    """What happens at a call: the words of the page, and what the layer is told."""

    words: str
    action: int
    number: int = 0
    lasting: bool = False

    def at(self, call: int, *roots: Path, direct: bool = False) -> dict[str, Any]:
        """Return the fault at this call below `roots`; with `direct`, of the writes past the page cache."""
        return {"action": self.action, "number": self.number, "lasting": self.lasting, "at": call, "direct": direct,
                "roots": [*map(str, roots)]}


KILLED = Kind("SIGKILL", KILL)
REFUSALS = (Kind("EIO once", REFUSE, errno.EIO), Kind("EIO for ever", REFUSE, errno.EIO, lasting=True),
            Kind("ENOSPC for ever", REFUSE, errno.ENOSPC, lasting=True), Kind("EACCES once", REFUSE, errno.EACCES),
            Kind("EACCES for ever", REFUSE, errno.EACCES, lasting=True))
AT_CALLS = {kind.words: kind for kind in (KILLED, *REFUSALS)}
STOPPED = Kind("SIGTERM", SIGNAL, signal.SIGTERM)
PAUSED = Kind("SIGSTOP", SIGNAL, signal.SIGSTOP)
HUNG_UP = Kind("SIGHUP", SIGNAL, signal.SIGHUP)
JUMPS = (Kind("clock a day ahead", JUMP, DAY_S), Kind("clock a day back", JUMP, -DAY_S))


def build(folder: Path) -> Path:
    """Compile the layer. Raises AssertionError where there is no C compiler: without one the suite proves nothing."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "the fault suite needs a C compiler (cc, gcc or clang) on the PATH: it compiles tests/faults/layer.c"
    made = folder / "layer.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(made), str(SOURCE), "-ldl", "-lpthread"],
                   check=True)
    return made


@dataclass(frozen=True)
class Done:
    """A call that changed something: `kind` is the letter of layer.c."""

    kind: str
    inode: int
    offset: int
    first: bytes             # its path, or what was written
    second: str              # the new path of a rename


def read_log(path: Path) -> Iterator[Done]:
    data, at = path.read_bytes(), 0
    while at < len(data):
        kind, inode, offset, first, second = HEAD.unpack_from(data, at)
        at += HEAD.size
        yield Done(kind.decode(), inode, offset, data[at:at + first], data[at + first:at + first + second].decode())
        at += first + second
