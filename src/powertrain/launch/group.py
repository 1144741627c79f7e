"""One process of a run that several share: its place among them, its turn to prepare, and the group that it joins.

Whoever starts the processes (powertrain train --processes, torchrun, a cluster's launcher that speaks its language) tells each
its place by environment variables. The data is prepared before the group exists, so that no time limit of the group runs while
a corpus is tokenised: first by one process of all, then by one of each machine, and the others find everything prepared.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from powertrain.launch import slurm
from powertrain.records import UserError, WrongUse
from powertrain.records.errors import LostPeer, RunFailed, first_line

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from powertrain.training.ranks import Ranks

T = TypeVar("T")
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NUMBERS = (*TOLD[:4], "MASTER_PORT")
ALONE_OR_TORCHRUN = "unset RANK to train with this process alone, or let torchrun start the processes and set the variables"
LAST_PORT = 65_535
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"       # where torch's agent looks for what ended a process
WITHIN = "POWERTRAIN_ANSWERS_WITHIN_S"       # seconds after which a process that does not answer is lost
STARTED_BY = "POWERTRAIN_STARTED_BY"         # process id of powertrain train --processes
TORCH_SAYS = "TORCH_CPP_LOG_LEVEL"           # read when torch is loaded, which else warns of connections and watched tensors
PREPARED, SAID, HEARD = "powertrain/prepared", "powertrain/said", "powertrain/heard"      # keys of the processes' store
MEET_WITHIN = timedelta(minutes=5)           # of the first process's start
ASKS_EVERY_S = 0.2
LONGEST_PREPARATION = timedelta(days=7)
FIRST_SAYS_WITHIN = timedelta(seconds=5)     # what ends all processes; the others leave it to the first one
PARENT_DEATH_SIGNAL = 1                      # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Place:
    """The place of this process among those of the run, and among those on its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def prepares_after(self) -> int | None:
        """Return the process that prepares before this one: the first of its machine, or of all; None for the first of all."""
        return None if self.rank == 0 else self.rank - self.local_rank if self.local_rank else 0


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return the place that the environment tells; None for a process that was started alone.

    Raises WrongUse where a variable holds no number, or one that does not go with the others.
    """
    if any(name not in environment for name in TOLD):
        return None
    for name in NUMBERS:
        if not environment[name].isdecimal():
            raise WrongUse(f"{name}={environment[name]} is no number; {ALONE_OR_TORCHRUN}")
    place, port = Place(*(int(environment[name]) for name in TOLD[:4])), int(environment["MASTER_PORT"])
    for name, rank, of, world in (("RANK", place.rank, "WORLD_SIZE", place.world),
                                  ("LOCAL_RANK", place.local_rank, "LOCAL_WORLD_SIZE", place.local_world)):
        if rank >= world:
            raise WrongUse(f"{name}={rank} does not go with {of}={world}: {name} counts from 0 and stays below {of}; "
                           f"{ALONE_OR_TORCHRUN}")
    if not 0 < port <= LAST_PORT:
        raise WrongUse(f"MASTER_PORT={port} is no port; use 1 to {LAST_PORT}, the same in every process")
    return place


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is not one of the run's."""
    return {name: value for name, value in environment.items() if name not in (*TOLD, *slurm.PLACE, STARTED_BY)}


@contextlib.contextmanager
def joined_group(place: Place | None, prepare: Callable[[], T]) -> Iterator[tuple[Ranks, T]]:
    """Prepare in turn, join the other processes, and yield this process's part of the run and what `prepare` returned.

    All come to the end together. Where this process fails, the agent that started it is told, and a person once. A process
    without a place prepares, and is alone.
    """
    if place is None:
        prepared = prepare()                 # what it refuses is refused before torch is loaded
        from powertrain.training.ranks import ALONE

        yield ALONE, prepared
        return
    import torch

    from powertrain.training.ranks import joined

    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    within = _answers_within(os.environ)
    with _telling(place, None):
        store = _meet(place, MEET_WITHIN)
    with _telling(place, store):
        if (other := place.prepares_after) is not None:
            _await_prepared(store, [other])
        prepared = prepare()
        store.set(f"{PREPARED}/{place.rank}", "yes")
        _await_prepared(store, range(place.world))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=within)
        try:
            ranks = joined(within)
            yield ranks, prepared
            ranks.barrier()                  # an agent that sees one end with another code than 0 ends the others at once
        finally:
            torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------ meeting


def _answers_within(environment: Mapping[str, str]) -> timedelta:
    from powertrain.training.ranks import ANSWERS_WITHIN

    told = environment.get(WITHIN)
    try:
        seconds = ANSWERS_WITHIN.total_seconds() if told is None else float(told)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise WrongUse(f"{WITHIN}={told} is no number of seconds; use {WITHIN}=600, for example")
    return timedelta(seconds=seconds)


def _meet(place: Place, within: timedelta) -> Store:
    """Return the store that all processes of the run share. Raises WrongUse where not all of them find it in time."""
    import torch
    from torch.distributed.rendezvous import rendezvous

    host, port = (os.environ[name] for name in TOLD[4:])
    try:
        if place.rank > 0:
            _await_first(host, int(port), within)
        store: Store = next(rendezvous("env://", timeout=within))[0]
    except (torch.distributed.DistError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise WrongUse(f"port {port} of {host} is taken by another program; set MASTER_PORT to a free port in every "
                           "process") from None
        if place.rank == 0:
            raise WrongUse(f"not all of the {place.world} processes came to port {port} of {host} within "
                           f"{within.total_seconds():g} s ({first_line(error)}); start all of them, each with this "
                           "MASTER_ADDR and MASTER_PORT, and let them through the firewall") from None
        raise WrongUse(f"process {place.rank} does not reach the first process at port {port} of {host} within "
                       f"{within.total_seconds():g} s ({first_line(error)}); check MASTER_ADDR and MASTER_PORT, and whether "
                       "the first process runs") from None
    return store


def _await_first(host: str, port: int, within: timedelta) -> None:
    """Wait until somebody listens there. Raises OSError. torch would wait twice as long, and print its stack."""
    until = time.monotonic() + within.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout=max(until - time.monotonic(), ASKS_EVERY_S)).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(ASKS_EVERY_S)


def _await_prepared(store: Store, ranks: Iterable[int]) -> None:
    """Wait until these processes have prepared the run. Raises LostPeer where the first process has failed."""
    store.wait([f"{PREPARED}/{rank}" for rank in ranks], LONGEST_PREPARATION)
    if store.check([SAID]):
        raise LostPeer("the first process has failed")


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Need other processes inside. Raises LostPeer where one of them has ended, wherever that comes to light."""
    from powertrain.training.sharded import lost_peer

    try:
        yield
    except RuntimeError as error:            # of the store, of a group that is being made, of an exchange
        raise lost_peer(error) or error from None


# ------------------------------------------------------------------------------------------------ failing


@contextlib.contextmanager
def _telling(place: Place, store: Store | None) -> Iterator[None]:
    """Leave what ends this process where its agent looks. What ends all of them is said on the first one's screen alone."""
    import torch

    try:
        with _answered():
            yield
    except LostPeer as error:                # the agent knows which one it was
        _wake_the_frozen()
        _say_first(place, store, error)
        if os.environ.get(ERROR_FILE):
            sys.exit(error.exit_code)
        if place.rank > 0 and store is not None:
            with contextlib.suppress(torch.distributed.DistError):     # it has ended, or is frozen
                sys.exit(_said(place, store)[0])         # srun takes the highest code for that of the run
        raise
    except UserError as error:
        told = bool(os.environ.get(ERROR_FILE))
        if told:
            _tell_agent(error)
        if place.rank == 0:
            _say_first(place, store, error)
            raise
        if not _is_said(place, store, error) and not told:
            raise
        sys.exit(error.exit_code)


def _tell_agent(error: UserError) -> None:
    extra = {"py_callstack": "", "timestamp": str(int(time.time()))}         # what torch's agent wants to find
    told = {"message": {"message": str(error), "exit_code": error.exit_code, "extraInfo": extra}}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps(told), encoding="utf-8")


def _say_first(place: Place, store: Store | None, error: UserError) -> None:
    """Let the other processes hear what ends the first one, before it takes the store away. An agent needs nobody to wait."""
    import torch

    if place.rank == 0 and store is not None:
        store.set(SAID, json.dumps([error.exit_code, str(error)]))
        for rank in range(place.world):      # nobody waits for what will not be prepared
            store.set(f"{PREPARED}/{rank}", "no")
        if not os.environ.get(ERROR_FILE):
            with contextlib.suppress(torch.distributed.DistError):
                store.wait([f"{HEARD}/{rank}" for rank in range(1, place.world)], FIRST_SAYS_WITHIN)


def _said(place: Place, store: Store) -> tuple[int, str]:
    """Return the exit code and the sentence of the first process; wait for it. Raises DistError where it says nothing."""
    store.wait([SAID], FIRST_SAYS_WITHIN)
    code, sentence = json.loads(store.get(SAID))
    store.set(f"{HEARD}/{place.rank}", "yes")
    return code, sentence


def _is_said(place: Place, store: Store | None, error: UserError) -> bool:
    """Return whether the first process says this too; wait for it, for its agent ends it once this one has."""
    import torch

    if store is None:
        return False
    try:
        return _said(place, store)[1] == str(error)
    except torch.distributed.DistNetworkError:           # it kept the store, and has ended: by what all have been given,
        return not isinstance(error, RunFailed)          # or because this process has
    except torch.distributed.DistError:
        return False


def _wake_the_frozen() -> None:
    """Let the other processes of this machine that somebody has stopped go on, so that they write their stacks and end."""
    if hasattr(signal, "SIGCONT"):
        with contextlib.suppress(psutil.Error):
            for other in psutil.Process(os.getppid()).children():
                other.send_signal(signal.SIGCONT)


def end_with_parent(environment: Mapping[str, str]) -> None:
    """Ask Linux to end this process in the orderly way if the one that started it dies: no process trains on alone.

    Exits where that one has died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if environment.get(STARTED_BY, str(parent := os.getppid())) != str(parent):
            sys.exit(128 + signal.SIGTERM)
