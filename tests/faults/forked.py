"""Runs many commands, each in a process of its own that is forked from one in which everything is loaded: some 10 ms each.

A command that hangs is killed, and none may take more than MOST_BYTES. With the layer below the C library (see layer.py) a
command may meet a fault at any call that changes a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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
SAID, LEFT, CALLS = ".said", ".left", ".calls"          # beside the command: what it said, what it left, its log of calls
LAYER = "POWERTRAIN_TEST_LAYER"
ASLEEP = (0, 0, 0, 0, 0, b"/nothing", b"/nothing", -1)
PIECE_BYTES = 1 << 15        # of a checkpoint's file, so that a tiny model's files too are written past the page cache in part


@dataclass(frozen=True)
class Ended:
    code: int | None         # None: it was killed because it did not end; negative: the signal that killed it
    said: str                # stdout and stderr
    seconds: float
    calls: int = 0           # that changed files, where a layer counted them; 0 for a command that was killed
    left_open: tuple[str, ...] = ()          # files that it had open at its end
    orphans: tuple[int, ...] = ()            # processes that it left behind


class Commands:
    """A process that forks commands; a context, so that it ends with the test."""

    def __init__(self, cache: Path, layer: Path | None = None, before: Sequence[str] = ()) -> None:
        place = {"POWERTRAIN_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
                 **({"LD_PRELOAD": str(layer), LAYER: str(layer)} if layer else {})}
        self.process = subprocess.Popen([*before, sys.executable, str(Path(__file__))], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env={**os.environ, **place})

    def run(self, words: Sequence[str], folder: Path, stdin: bytes = b"", within_s: float = WITHIN_S, **more: Any) -> Ended:
        """Run `powertrain WORDS` in `folder`. `more`: see `_arm` and `_command`."""
        self.begin(words, folder, stdin, within_s, **more)
        return self.end()

    def begin(self, words: Sequence[str], folder: Path, stdin: bytes = b"", within_s: float = WITHIN_S, **more: Any) -> None:
        """Start a command; `end` waits for it."""
        assert self.process.stdin is not None
        told = {"words": list(words), "folder": str(folder), "stdin": stdin.hex(), "within_s": within_s, **more}
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def end(self) -> Ended:
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        return Ended(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

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
    for descriptor in told.get("full", ()):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    for descriptor in told.get("closed", ()):            # the terminal is gone: writing to it fails
        given, taken = os.pipe()
        os.close(given)
        os.dup2(taken, descriptor)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, encoding="utf-8", closefd=False)
                                         for number, mode in enumerate("rww"))
    os.chdir(told["folder"])
    if "cache" in told:
        os.environ["POWERTRAIN_CACHE"] = told["cache"]
    for name, value in told.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    layer = _arm(told.get("fault", {})) if LAYER in os.environ else None
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
    calls = layer.faults_calls() if layer else 0
    if layer:
        layer.faults_arm(*ASLEEP)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    left = [name for name in targets if name.startswith(told["folder"]) and not name.endswith((SAID, CALLS))]
    out.with_name(LEFT).write_text(json.dumps({"calls": calls, "left_open": left}))
    os._exit(code)


def _arm(fault: Mapping[str, Any]) -> Any:
    """Wake the layer: at the call `at` that changes a file below `roots` it does `action`; `log` takes all of them.

    With `direct` it counts only the writes of whole blocks past the page cache.
    """
    layer = ctypes.CDLL(os.environ[LAYER])
    layer.faults_calls.restype = ctypes.c_long
    layer.faults_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p,
                                 ctypes.c_char_p, ctypes.c_int]
    log = os.open(fault["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND) if "log" in fault else -1
    roots = [str(Path(root).resolve()).encode() for root in (*fault.get("roots", ()), "/nothing", "/nothing")]
    layer.faults_arm(fault.get("action", 0), fault.get("at", 0), fault.get("lasting", False), fault.get("number", 0),
                     fault.get("direct", False), roots[0], roots[1], log)
    return layer


def _session(leader: int) -> list[int]:
    """Return the processes of the session that a command was the leader of."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(path.parent.name))
    return found


def _wait(child: int, within_s: float, signals: Sequence[tuple[float, int]] = ()) -> int | None:
    """Return the exit code of the child, negative for a signal; None where it had to be killed. `signals` come after pauses."""
    for pause_s, number in signals:
        time.sleep(pause_s)
        os.kill(child, number)               # of one that has ended, which nobody has waited for yet, too
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
    from powertrain.training import stored

    machine_watch.Meanwhile.disturbed_by = ""            # the machine is measured once, however busy it is
    stored.WRITTEN_BYTES = PIECE_BYTES
    gc.collect()
    gc.freeze()                              # or each command would look at all these objects
    for line in sys.stdin:
        told = json.loads(line)
        out = Path(told["folder"]) / SAID
        for old in (out, out.with_name(LEFT)):
            old.unlink(missing_ok=True)
        began = time.monotonic()
        if not (child := os.fork()):
            _command(told, out)
        code = _wait(child, told["within_s"], told.get("signals", ()))
        said = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
        left = json.loads(found.read_text()) if (found := out.with_name(LEFT)).exists() else {}
        orphans = _session(child) if LAYER in os.environ else []
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
        print(json.dumps({"code": code, "said": said, "seconds": time.monotonic() - began, **left, "orphans": orphans}),
              flush=True)


if __name__ == "__main__":
    main()
