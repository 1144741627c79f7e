"""One process of a run that several share: its place among them, its turn to prepare, and the group that it joins.

Whoever starts the processes (powertrain train --processes, torchrun, a cluster's launcher that speaks its language) tells each
its place by environment variables. The first process prepares the data before the group exists, so that no time limit of the
group runs while a corpus is tokenised; the others wait for it, and find everything prepared.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from powertrain.records import UserError
from powertrain.records.errors import LostPeer, first_line

if TYPE_CHECKING:
    from powertrain.training.ranks import Ranks

T = TypeVar("T")
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"       # where torch's agent looks for what ended a process
PREPARED = "powertrain/prepared"
LONGEST_PREPARATION = timedelta(days=7)
ANSWERS_WITHIN = timedelta(minutes=10)       # of another process, before the run ends: a step, an evaluation or a save
PARENT_DEATH_SIGNAL = 1                      # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Place:
    """The place of this process among those of the run, and among those on its machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return the place that the environment tells; None for a process that was started alone."""
    if any(name not in environment for name in TOLD):
        return None
    return Place(*(int(environment[name]) for name in TOLD[:4]))


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is not one of the run's."""
    return {name: value for name, value in environment.items() if name not in TOLD}


@contextlib.contextmanager
def joined_group(place: Place, prepare: Callable[[], T]) -> Iterator[tuple[Ranks, T]]:
    """Prepare in turn, join the other processes, and yield this process's part of the run and what `prepare` returned."""
    import torch

    from powertrain.training.ranks import joined

    _end_with_parent()
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
    store, _, _ = next(torch.distributed.rendezvous("env://"))
    if place.rank:
        try:
            store.wait([PREPARED], LONGEST_PREPARATION)
        except torch.distributed.DistError as error:     # the first process has ended, and has said why
            raise LostPeer(first_line(error)) from error
    prepared = prepare()
    store.set(PREPARED, "yes")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=ANSWERS_WITHIN)
    try:
        yield joined(), prepared
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def reporting_to_agent(place: Place) -> Iterator[None]:
    """Leave what ends this process where the agent that started it looks; the first process says it on its own screen."""
    try:
        yield
    except UserError as error:
        if isinstance(error, LostPeer):      # the agent knows which one it was
            sys.exit(error.exit_code)
        _tell_agent(str(error))
        if place.rank == 0:
            raise
        sys.exit(error.exit_code)


def _tell_agent(message: str) -> None:
    if file := os.environ.get(ERROR_FILE):
        told = {"message": {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}
        Path(file).write_text(json.dumps(told), encoding="utf-8")


def _end_with_parent() -> None:
    """Ask Linux to end this process in the orderly way if the one that started it dies: no process trains on alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
