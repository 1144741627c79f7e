"""A probe of data parallelism: processes that share each step, against one process."""

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from powertrain.claims.probes import probe
from powertrain.claims.probes.probe import Context, Measured, answering, arm_name, open_training
from powertrain.evidence.stats import by_turns
from powertrain.evidence.worker import ChildProcess
from powertrain.facts.measure import seconds_of
from powertrain.training.loop import StepResult, measured_step_bytes
from powertrain.training.ranks import joined
from powertrain.training.setup import COMMUNICATION


def shared_steps(context: Context, *, words: Sequence[str], a: Sequence[str] | None = None, b: Sequence[str] = (),
                 processes: int = 2, steps: int = 6) -> Measured:
    """Return how many times as fast processes that share each step train as one process, or as others that share it.

    `a` and `b` are added to `words`; without `a` the first arm is one process. Each process has a GPU of its own; on a CPU they
    divide the cores that one process has. Detail, of each arm: the first step's loss, which is equal up to rounding, and
    the tokens that the first process computes; the memory of the first process's step, and its ratio; the seconds of a step
    in which the first process exchanges gradients or waits for the others (sharding exchanges them within its passes).
    """
    both = [("one process", 1, ()), (f"{processes} processes", processes, b)] if a is None else \
        [(arm_name(added), processes, added) for added in (a, b)]
    arms: probe.Arms = {}
    first_steps: dict[str, dict[str, float]] = {}
    exchange_s: dict[str, list[float]] = {}
    with contextlib.ExitStack() as opened:
        for name, world, added in both:
            children = [opened.enter_context(ChildProcess(f"process {rank} of {world}", _share, os.getcwd(), [*words, *added],
                                                          context.cache, context.folder / f"group-{len(arms)}", rank, world))
                        for rank in reversed(range(world))]      # the first process last: its end ends the others
            first_steps[name] = [child.answer() for child in children][-1]
            exchange_s[name] = []
            arms[name] = partial(_step_s, children[-1], steps, exchange_s[name])
        rounds = by_turns(arms, context.deadline)
    held = [step["memory_bytes"] for step in first_steps.values()]
    return probe.faster(rounds, "step_s", first_steps=first_steps, memory_ratio=held[1] / held[0],
                        exchange_s=probe.medians(exchange_s))


def _step_s(first: ChildProcess, steps: int, exchange_s: list[float]) -> float:
    """Return the seconds of a step; note how many of them the first process exchanges tensors."""
    step_s, exchanging_s = first.ask("steps", steps)
    exchange_s.append(exchanging_s)
    return float(step_s)


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
        sender.send({**first, "memory_bytes": measured_step_bytes(training.setup, training.state)})
        while steps := ranks.agree(_order(sender) if rank == 0 else 0):
            taken: list[StepResult] = []
            seconds = seconds_of(lambda: taken.extend(training.steps(steps)), training.setup.device.type)  # noqa: B023
            exchanging = [result.laps.parts().get(COMMUNICATION, 0.0) for result in taken]
            if rank == 0:
                sender.send((seconds / steps, sum(exchanging) / steps))


def _order(sender: Connection) -> int:
    """Return the steps that the parent asks for next; 0 where it has gone."""
    try:
        _, (steps,) = sender.recv()
    except EOFError:
        return 0
    return int(steps)
