"""A probe of data parallelism: processes that share each step, against one process."""

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from powertrain.claims.probes import probe
from powertrain.claims.probes.probe import Context, Measured, answering, open_training
from powertrain.evidence.stats import by_turns
from powertrain.evidence.worker import ChildProcess
from powertrain.training.ranks import joined


def shared_steps(context: Context, *, words: Sequence[str], processes: int = 2, steps: int = 6) -> Measured:
    """Return how many times as fast processes that share each step train as one process.

    On a GPU each process has one of its own; on a CPU they divide the cores that the one process has. Detail: the first step of
    both arms, its loss, which is equal up to rounding, and the tokens that the first process computes.
    """
    arms: probe.Arms = {}
    first_steps: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as opened:
        for name, world in (("one process", 1), (f"{processes} processes", processes)):
            children = [opened.enter_context(ChildProcess(f"process {rank} of {world}", _share, os.getcwd(), words,
                                                          context.cache, context.folder / f"group-{world}", rank, world))
                        for rank in reversed(range(world))]      # the first process last: its end ends the others
            first_steps[name] = [child.answer() for child in children][-1]
            arms[name] = partial(children[-1].ask, "steps", steps)
        rounds = by_turns(arms, context.deadline)
    return probe.faster(rounds, "step_s", first_steps=first_steps)


def _share(sender: Connection, folder: str, words: Sequence[str], cache: Path, group: Path, rank: int, world: int) -> None:
    """Take steps together with the others; the first process takes orders and answers each with the seconds of a step."""
    with answering(sender, folder, f"process {rank} of {world}"):
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        if world > 1:
            torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", init_method=f"file://{group}",
                                                 rank=rank, world_size=world)
        training, ranks = open_training(words, cache, warm_up=0), joined()
        torch.set_num_threads(training.prepared.facts.hardware.cores)
        first, *_ = [{"loss": float(result.loss), "tokens": result.own_tokens} for result in training.steps(probe.WARM_UP)]
        sender.send(first)
        while steps := ranks.agree(_order(sender) if rank == 0 else 0):
            step_s = training.step_s(steps)
            if rank == 0:
                sender.send(step_s)


def _order(sender: Connection) -> int:
    """Return the steps that the parent asks for next; 0 where it has gone."""
    try:
        _, (steps,) = sender.recv()
    except EOFError:
        return 0
    return int(steps)
