"""Runs the command line in processes of their own, which a fault may kill: `run_cli` and `run_ranks`, from a warm fork server.

`run_processes` runs a function of a test so.

A fault is a place and a number:
  ("step", 5)     kills with SIGKILL after optimizer step 5, before anything else happens but the end of a save in flight
  ("after", 900)  kills 900 ms after the process was started, wherever it is then
  ("save", 7)     kills at the 7th call to the disk (write, sync, rename, delete) from the first save on, before it takes effect
  ("writing", 5)  kills in the midst of the 5th file of a checkpoint, after the step that is done beside it
  ("fork", 5)     kills with SIGKILL after step 5, and a process that it has forked lives on for 60 s
  ("grace", 500)  lets a run that was asked to stop wait 500 ms for its uploads, and the first step as long for a mirror
  ("slow", 200)   makes each file of a checkpoint take 200 ms more
  ("room", 3)     lets the disk have 300 bytes free at the first 3 looks; a save that waits looks after every step
  ("copy", 90)    lets the machine have 90 bytes of memory free for the copy of a checkpoint
  ("signal", 5)   sends SIGTERM to itself after step 5
  ("evaluating", 2)   sends it at the beginning of the second evaluation
  ("full", 2)     makes the system refuse the 2nd and all later writes of a checkpoint's files, as a full disk does
  ("model", 0)    does so while the final model is written
  ("delete", 1)   makes it refuse the 1st and all later deletions of a checkpoint
  ("events", 2)   makes it refuse the 2nd and all later writes of events that wait for the disk
  ("exchange", 3) lets the 3rd exchange of gradients run out of memory in this process
  ("cores", 1)    lets the process and those that it starts use one core, on which other tests do not slow its threads down
  ("memory", 90)  lets the process have 90 MiB more than it has when the first step begins
  ("shared", 1)   lets a file that another process writes take 1 s to be seen, in place of 10, before the folder is not shared
  ("sync", 50)    makes each write of events that waits for the disk take 50 ms more, by a time of day that nobody sets
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from powertrain.evidence.worker import PRELOADED

# a process has one fork server, and measuring uses it too: whoever starts it, children find all of this loaded
PRELOADED += ["powertrain.cli", "powertrain.run.prepare", "powertrain.use.scoring"]

Fault = tuple[str, int]
WITHIN_S = 600               # against what hangs; other tests run beside this one
FULL_FROM_BYTES = 1 << 15    # of one file: fewer than a checkpoint's weights take, and more than the events, written meanwhile
ENDS_WITHIN_S = 30           # a process whose peer has failed, and that is asked to

# 3 steps an epoch, accumulation in unequal passes, dropout, saves that do not divide the epoch
TINY = ["model.family=gpt2", "model.layers=2", "model.width=32", "model.heads=2", "model.dropout=0.2", "data.tokenizer=char",
        "data.block=16", "train_batch_size=14", "techniques.micro_batch.examples=5", "max_steps=11", "learning_rate=3e-3",
        "save_steps=4", "eval_steps=3", "logging_steps=2", "data.max_chars=900", "sample.tokens=4", "sample.prompt=",
        "techniques.threads=off"]


def run_cli(words: Sequence[str], cache: Path, folder: Path, fault: Fault | None = None,
            env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `powertrain WORDS` run in `folder`; a negative code is the signal that killed it.

    `env`: more environment. What this process sets in its own does not reach the command, which the fork server starts.
    """
    process, out, err = start(words, cache, folder, fault, env)
    process.join(timeout=WITHIN_S)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"powertrain {' '.join(words)} did not end:\n{err.read_text()}")
    assert process.exitcode is not None
    return process.exitcode, out.read_text(), err.read_text()


def run_ranks(words: Sequence[str], cache: Path, folder: Path, faults: Sequence[Fault | None]) -> list[tuple[int, str]]:
    """(exit code, stderr) of each of the processes that share `powertrain WORDS`, one for each of `faults`.

    Each takes itself for the only one on its machine, so there may be more than this machine has cores. As an agent does, this
    asks the others to end when one of them has failed; it starts none again.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = str(len(faults))
    started = [start(words, cache, folder, fault, {
        "RANK": str(rank), "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for rank, fault in enumerate(faults)]
    processes = [process for process, _, _ in started]
    try:
        running, until = list(processes), time.monotonic() + WITHIN_S
        while running and not any(process.exitcode for process in processes) and time.monotonic() < until:
            connection.wait([process.sentinel for process in running], timeout=until - time.monotonic())
            running = [process for process in running if process.is_alive()]
        for process in running:
            process.terminate()
        for process in running:
            process.join(ENDS_WITHIN_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [(process.exitcode, err.read_text() if err.exists() else "") for process, _, err in started]


def run_processes(function: Callable[..., None], world: int, *arguments: object) -> None:
    """Run `function(rank, *arguments)` in `world` processes; raise what one of them raised."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(function, arguments, nprocs=world, start_method="forkserver")


def start(words: Sequence[str], cache: Path, folder: Path, fault: Fault | None = None, place: Mapping[str, str] | None = None
          ) -> tuple[Any, Path, Path]:
    """A process that runs `powertrain WORDS` in `folder`, and the files of its stdout and stderr. `place`: more environment."""
    place = place or {}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    out, err = (folder / f".{name}{place.get('RANK', place.get('SLURM_PROCID', ''))}" for name in ("stdout", "stderr"))
    folders = (str(cache), str(folder), str(out), str(err))
    process = context.Process(target=_child, args=(list(words), *folders, fault, dict(place)))
    process.start()
    return process, out, err


def _child(words: list[str], cache: str, folder: str, out: str, err: str, fault: Fault | None, place: dict[str, str]) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(place, POWERTRAIN_CACHE=cache)
    os.chdir(folder)
    torch.set_num_threads(1)                 # tiny models, and several tests at a time
    if fault is not None:
        _plant(*fault)
    sys.argv = ["powertrain", *words]
    from powertrain.cli import main

    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _plant(place: str, number: int) -> None:
    from powertrain.launch import shared_folder
    from powertrain.records import checkpoints, event_log
    from powertrain.run import disk, mirroring, part, saving, session
    from powertrain.training import checkpoint, loop, ranks

    if place in ("step", "signal", "fork"):
        original, writing = part.train, _written_beside()

        def train(*arguments: Any) -> Any:
            for result in original(*arguments):
                if result.step == number:
                    for save in writing:
                        save.finish()        # a save of an earlier step is over
                    if place == "fork" and os.fork() == 0:
                        time.sleep(60)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGTERM if place == "signal" else signal.SIGKILL)
                yield result

        part.train = train
    elif place == "evaluating":              # a signal at the beginning of this evaluation, however short it is
        session.SHORT_S, evaluations, evaluate = -1.0, itertools.count(1), session.evaluate

        def signalled(*arguments: Any, **named: Any) -> Any:
            if next(evaluations) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(*arguments, **named)

        session.evaluate = signalled  # type: ignore[assignment]
    elif place == "writing":
        part.train, checkpoint.write_file = _killed_while_writing(part.train, checkpoint.write_file, number)
    elif place == "slow":
        checkpoint.write_file = _slow(checkpoint.write_file, number / 1e3)
    elif place == "room":
        saving.LOOK_EVERY_S = 0.0
        looks = itertools.count(1)
        disk.shutil = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(  # type: ignore[assignment]
            free=300 if next(looks) <= number else shutil.disk_usage(path).free))
    elif place == "grace":
        mirroring.GRACE_S = mirroring.PASSING_S = number / 1e3
    elif place == "copy":
        saving.usable_memory = lambda: (number, number, "a test")
    elif place == "exchange":
        short = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes")
        ranks.GroupRanks.sum_step = _refused(ranks.GroupRanks.sum_step, number, short)  # type: ignore[method-assign]
    elif place == "after":
        killer = threading.Timer(number / 1000, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
    elif place == "cores":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])
    elif place == "memory":
        part.train = loop.train = _in_little_memory(loop.train, number << 20)
    elif place == "save":
        saving.save = _counted_from_here(saving.save, number)
    elif place == "shared":
        shared_folder.SEEN_WITHIN_S = number
    elif place == "sync":
        time.time = time.perf_counter
        event_log.os = SimpleNamespace(**{**vars(os), "fsync": _slow(os.fsync, number / 1e3)})  # type: ignore[assignment]
    elif place == "delete":
        checkpoints.shutil = SimpleNamespace(rmtree=_refused(shutil.rmtree, from_call=number))  # type: ignore[assignment]
    elif place == "events":
        event_log.os = SimpleNamespace(**{**vars(os), "fsync": _refused(os.fsync, from_call=number)})  # type: ignore[assignment]
    elif place == "model":
        session.save_model = _on_a_full_disk(session.save_model, from_call=1)
    elif place == "full":
        checkpoint.write_file = _on_a_full_disk(checkpoint.write_file, from_call=number)


def _written_beside() -> list[Any]:
    """Return a list that each write of a checkpoint beside the training joins from now on."""
    from powertrain.training import checkpoint

    begun: list[Any] = []

    class Noted(checkpoint.InThread):
        def __init__(self, do: Callable[[], None]) -> None:
            super().__init__(do)
            begun.append(self)

    checkpoint.InThread = Noted  # type: ignore[misc]
    return begun


def _counted_from_here(save: Callable[..., None], number: int) -> Callable[..., None]:
    from powertrain.run import saving
    from powertrain.training import checkpoint, stored

    count = itertools.count(1)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    def first_save(*arguments: Any, **named: Any) -> None:
        saving.save = save
        checkpoint.write_file = counted(checkpoint.write_file)
        stored.os.fsync = counted(os.fsync)
        checkpoint.sync = counted(checkpoint.sync)
        checkpoint.os.rename = counted(os.rename)
        checkpoint.shutil.rmtree = counted(shutil.rmtree)
        Path.write_text = counted(Path.write_text)  # type: ignore[method-assign]
        save(*arguments, **named)

    return first_save


def _refused(function: Callable[..., Any], from_call: int, error: Exception | None = None) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) >= from_call:
            raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*arguments)

    return call


def _slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return call


def _on_a_full_disk(function: Callable[..., Any], from_call: int) -> Callable[..., Any]:
    """`function`, during which the system refuses to write more than FULL_FROM_BYTES into one file."""
    import resource

    calls = itertools.count(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)        # the write fails instead of killing the process

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) < from_call:
            return function(*arguments, **named)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_FROM_BYTES, hard))
        try:
            return function(*arguments, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return call


def _killed_while_writing(train: Callable[..., Any], write: Callable[..., Any], number: int) -> tuple[Callable[..., Any], ...]:
    """`train` and `write_file`: the process kills itself after the step beside which the `number`-th file is half written."""
    writing, calls, half_written = _written_beside(), itertools.count(1), threading.Event()

    def steps(*arguments: Any) -> Any:
        for result in train(*arguments):
            for save in writing:
                while save.is_running and not half_written.wait(0.01):        # however slow it is beside other tests
                    pass
            if half_written.is_set():
                os.kill(os.getpid(), signal.SIGKILL)
            yield result

    def write_some(path: Path, parts: Any) -> Any:
        if next(calls) < number:
            return write(path, parts)
        content = b"".join(parts)
        path.write_bytes(content[:len(content) // 2])
        half_written.set()
        return time.sleep(WITHIN_S)

    return steps, write_some


def _in_little_memory(function: Callable[..., Any], more_bytes: int) -> Callable[..., Any]:
    """`function`, from whose first call on the system gives the process no more than `more_bytes` besides what it has."""
    import ctypes
    import resource

    map_from = -3                            # M_MMAP_THRESHOLD: what was freed before the limit leaves no room in the heap
    ctypes.CDLL(None).mallopt(map_from, 1 << 16)
    calls = itertools.count()

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 0:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            limit = int(status["VmData"].split()[0]) * 1024 + more_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        return function(*arguments, **named)

    return call
