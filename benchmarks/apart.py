"""Cases in processes of their own, one after the other: what fails, hangs or is killed is an outcome, and the others go on.

A case is a command. It appends what it has measured to the file that is its last argument, a line of JSON each, as soon as it
has it: so what was measured before a failure is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAST_LINES = 15
DONE, FAILED, KILLED, TOO_LONG, NO_MEMORY, INTERRUPTED, NOT_BEGUN = (
    "done", "failed", "killed", "too long", "out of memory", "interrupted", "not begun")


@dataclass(frozen=True)
class Case:
    name: str
    command: tuple[str, ...]
    needs: str = ""                          # the case that has to be done before


@dataclass(frozen=True)
class Outcome:
    case: str
    status: str
    reason: str = ""                         # empty where it is done
    seconds: float = 0.0
    measured: tuple[Any, ...] = ()
    last_lines: tuple[str, ...] = field(default=())      # that the case has printed, where it is not done


def outcomes(cases: Sequence[Case], limit_s: float, scratch: Path) -> Iterator[Outcome]:
    """Run the cases in their order, each at most `limit_s`, and yield what came of each. Ctrl-C ends the one that runs and the
    rest; nothing is raised."""
    done: set[str] = set()
    interrupted = False
    for number, case in enumerate(cases):
        if interrupted or (case.needs and case.needs not in done):
            yield Outcome(case.name, NOT_BEGUN, "the benchmark was interrupted" if interrupted else f"{case.needs} is not done")
            continue
        outcome = run(case, limit_s, scratch / f"case-{number}")
        interrupted = outcome.status == INTERRUPTED
        if outcome.status == DONE:
            done.add(case.name)
        yield outcome


def run(case: Case, limit_s: float, files: Path) -> Outcome:
    """Run one case; `files` is the beginning of the paths of its log and its results."""
    results, log = files.with_suffix(".jsonl"), files.with_suffix(".log")
    results.touch()
    began, status, reason = time.monotonic(), "", ""
    with log.open("w", encoding="utf-8") as written:
        # a session of its own: Ctrl-C reaches this process only, and what the case has started ends with it
        process = subprocess.Popen([*case.command, str(results)], stdin=subprocess.DEVNULL, stdout=written,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status, reason = TOO_LONG, f"ended after {limit_s:,.0f} s"
        except KeyboardInterrupt:
            status, reason = INTERRUPTED, "Ctrl-C"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):   # on macOS, of a group that has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if not status:
        status, reason = _ended(process.returncode, lines)
    return Outcome(case.name, status, reason, time.monotonic() - began, tuple(_measured(results)),
                   () if status == DONE else tuple(lines[-LAST_LINES:]))


def _ended(code: int, lines: Sequence[str]) -> tuple[str, str]:
    """Return status and reason of a process that ended by itself, with this exit code, after it had printed these lines."""
    if code == 0:
        return DONE, ""
    if code < 0:
        return KILLED, f"by {signal.Signals(-code).name}" + (
            ": by somebody, or by the system where memory ran out" if -code == signal.SIGKILL else "")
    said = next((line for line in reversed(lines) if "out of memory" in line.lower() or "OutOfMemory" in line), None)
    return (NO_MEMORY, said) if said else (FAILED, lines[-1] if lines else f"exit code {code}")


def _measured(results: Path) -> Iterator[Any]:
    """Yield what the case has written; of a line that it could not finish nothing."""
    for line in results.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def tell(results: Path, **measured: Any) -> None:
    """Append what a case has measured to its results."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(measured) + "\n")
