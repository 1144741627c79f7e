"""Several processes on this machine that share a run, through torch's elastic agent.

A process that dies takes no run with it: the others end, and all are started again at the newest whole checkpoint.
"""

import inspect
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.launch.group import STARTED_BY, TORCH_SAYS
from powertrain.records import RunFailed
from powertrain.records.errors import STOPPED_AND_SAVED, LostPeer
from powertrain.records.event_log import read_events
from powertrain.records.events import End
from powertrain.records.timeline import last_of

STACKS = "stacks"            # training/stalls.py writes there
MOST_RESTARTS = 3            # in a row, between which no checkpoint was saved
SAVING_S = 3600              # that the processes have to finish a step and save it, before they are killed


def train_in_processes(words: Sequence[str], options: Sequence[str], folder: Path, processes: int, say: Callable[[str], None]
                       ) -> int:
    """Train the run in `folder`, or go on with it; return its exit code. `words` and `options` are those of `powertrain train`.

    Raises RunFailed where a process ends for a reason that a new start would not cure.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the agent's store is not the workers': the keys of processes that died would be in it when others start
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault(TORCH_SAYS, "ERROR")
    os.environ[STARTED_BY] = str(os.getpid())
    logging.disable(logging.ERROR)           # what torch's agent reports is said here
    restarts, saved, resumed = 0, _checkpoints(folder), _has_begun(folder)
    patience: dict[str, Any] = {"shutdown_timeout": SAVING_S}
    if "shutdown_timeout" not in inspect.signature(LaunchConfig).parameters:         # torch 2.11
        patience = {}
        say("this torch ends the processes 30 s after a signal to stop, saved or not; torch 2.12 waits until they have saved")
    while True:
        began_s, begun = time.time(), _has_begun(folder)
        asked = [*(words if resumed or not begun else ()), *options, "--resume" if begun else "--output", str(folder)]
        try:
            with tempfile.TemporaryDirectory(prefix="powertrain-") as errors:
                config = LaunchConfig(1, 1, processes, run_id=folder.name, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                                      max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=errors), **patience)
                elastic_launch(config, sys.executable)("-m", "powertrain", "train", *asked)
            return 0
        except SignalException as stopped:
            return STOPPED_AND_SAVED if was_stopped(folder) else 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            told = {rank: failure.message for rank, failure in failed.failures.items()}
            codes = _codes({rank: failure.exitcode for rank, failure in failed.failures.items()}, told)
            if (code := _ended(codes, told)) is not None:
                return code
        restarts, saved = (0, now) if (now := _checkpoints(folder)) != saved else (restarts + 1, saved)
        why = _why(codes, folder, began_s)
        if restarts > MOST_RESTARTS:
            raise RunFailed(f"{why}; {restarts} starts in a row brought no new checkpoint. If the machine is short of memory, "
                            f"use fewer processes; --resume {folder} continues the run")
        say(f"{why}: all processes start again, at the newest whole checkpoint")


def _codes(codes: Mapping[int, int], messages: Mapping[int, object]) -> dict[int, int]:
    """Return how processes ended. One that has told its error may be ended by the agent, for another process that lost it."""
    return {rank: told["exit_code"] if isinstance(told := messages[rank], dict) and "exit_code" in told else code
            for rank, code in codes.items()}


def _ended(codes: Mapping[int, int], messages: Mapping[int, object]) -> int | None:
    """Return the exit code of a run whose processes ended in order; None where one was killed, or did not answer.

    `codes` are those other than 0, by rank. Raises RunFailed for a process that failed for a reason of its own.
    """
    if STOPPED_AND_SAVED in codes.values():
        return STOPPED_AND_SAVED
    wrong = sorted(rank for rank, code in codes.items() if not was_lost(code))
    if not wrong:
        return None
    if wrong[0] > 0:
        raise _as_error(wrong[0], codes[wrong[0]], messages[wrong[0]])
    return codes[0]                          # the first process has said why on its own screen


def was_lost(code: int) -> bool:
    """Return whether a process that ended with this code was killed, or did not get an answer; a new start may cure that."""
    return code < 0 or code == LostPeer.exit_code


def _why(codes: Mapping[int, int], folder: Path, began_s: float) -> str:
    """Return why processes that ended by no error of their own ended."""
    written = [path for path in (folder / STACKS).glob("*") if path.stat().st_size and path.stat().st_mtime >= began_s]
    if written and -9 not in codes.values():         # SIGKILL; a library that waits in vain ends its process by other signals
        return f"a process did not answer; {folder / STACKS} says what the processes were doing"
    killed = next(((rank, -code) for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM), None)
    return "a process did not answer" if not killed else f"process {killed[0]} was ended by {signal.Signals(killed[1]).name}"


def _as_error(rank: int, code: int, told: object) -> RunFailed:
    message = told.get("message") if isinstance(told, dict) else None
    error = RunFailed(f"process {rank}: {message}" if message else f"process {rank} ended with code {code}; what it printed "
                                                                  "says why")
    error.exit_code = code  # type: ignore[misc]
    return error


def _has_begun(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file()


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def was_stopped(folder: Path) -> bool:
    """Return whether the run's last session was asked to stop, and saved."""
    end = last_of(End, read_events(folder / "events.jsonl")) if (folder / "events.jsonl").is_file() else None
    return end is not None and end.reason == "stopped"
