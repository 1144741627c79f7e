"""Runs many commands, each in a process of its own that is forked from one in which everything is loaded: some 10 ms each.

A command that hangs is killed, and none may take more than MOST_BYTES.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 12 << 30        # of addresses: torch alone has 5 GiB of them
WITHIN_S = 20.0


@dataclass(frozen=True)
class Ended:
    code: int | None         # None: it was killed because it did not end
    said: str                # stdout and stderr
    seconds: float


class Commands:
    """A process that forks commands; a context, so that it ends with the test."""

    def __init__(self, cache: Path) -> None:
        place = {"POWERTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen([sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, **place})

    def run(self, words: Sequence[str], folder: Path, stdin: bytes = b"", within_s: float = WITHIN_S) -> Ended:
        """Run `powertrain WORDS` in `folder`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        told = {"words": list(words), "folder": str(folder), "stdin": stdin.hex(), "within_s": within_s}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _command(told: Mapping[str, Any], out: Path) -> None:
    """Be the command: in a forked process."""
    os.setsid()                              # it is killed with all that it starts
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given, taken = os.pipe()
    os.write(taken, bytes.fromhex(told["stdin"]))
    os.close(taken)
    os.dup2(given, 0)
    for descriptor in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, encoding="utf-8", closefd=False)
                                         for number, mode in enumerate("rww"))
    os.chdir(told["folder"])
    sys.argv = ["powertrain", *told["words"]]
    from powertrain.cli import main

    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(child: int, within_s: float) -> int | None:
    """Return the exit code of the child, negative for a signal; None where it had to be killed."""
    handle = os.pidfd_open(child)
    ended, _, _ = select.select([handle], [], [], within_s)
    os.close(handle)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    """Fork a command for each line of standard input."""
    import torch

    torch.set_num_threads(1)
    import powertrain.audit.audit
    import powertrain.cli
    import powertrain.run.prepare
    import powertrain.run.session
    import powertrain.use.conversation
    import powertrain.use.scoring  # noqa: F401
    from powertrain.facts import machine_watch

    machine_watch.Meanwhile.disturbed_by = ""            # the machine is measured once, however busy it is
    for line in sys.stdin:
        told = json.loads(line)
        out = Path(told["folder"]) / ".said"
        began = time.monotonic()
        if not (child := os.fork()):
            _command(told, out)
        code = _wait(child, told["within_s"])
        said = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
        print(json.dumps({"code": code, "said": said, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
