"""The parts of every probe: its context and result, operations that are timed, a process of its own, and a training in it."""

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from powertrain.evidence.clock import Arena, Pace
from powertrain.evidence.stats import MARGIN, interval
from powertrain.evidence.worker import ChildProcess, be_silent
from powertrain.facts.measure import seconds_of
from powertrain.recipe import resolve_words
from powertrain.records import RunFailed, UserError, WrongUse
from powertrain.records.evidence import Interval
from powertrain.records.phases import nobody
from powertrain.run.prepare import Prepared, agreed, build_setup, prepare
from powertrain.training.loop import State, StepResult, new_state, train
from powertrain.training.ranks import joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

LONG_ENOUGH_S, MOST_TIMES = 0.1, 1000        # a short operation is repeated for this long, and at most this often
WARM_UP = 4                                  # steps before anything is timed
PACE = Pace(window_s=0.5, pairs=6, most_pairs=12, warm_up_s=5.0)     # of two arms of `train`

T = TypeVar("T")
Arms = dict[str, Callable[[], float]]        # name -> function that carries the arm out once and returns one value
Rounds = Mapping[str, Sequence[float]]       # name of an arm -> its values, one for each repeat


@dataclass(frozen=True)
class Context:
    """The means with which experiments are carried out."""

    cache: Path                              # token stores and the machine's peaks
    deadline: float                          # by time.monotonic(): begin no further repeat after it
    arena: Arena                             # for arms of `train`; None in the process of a probe
    folder: Path                             # to write into; the caller makes and removes it
    pace: Pace = PACE
    margin: float = MARGIN


@dataclass(frozen=True)
class Measured:
    value: Interval
    unit: str                                # "times as fast", "of the step's time", ...
    a: str                                   # the arms, in words
    b: str
    detail: Mapping[str, Any]                # plain JSON: the values that `value` was computed from


def ratio(rounds: Rounds, upper: str, lower: str) -> Interval:
    """Return arm `upper` over arm `lower`, repeat by repeat."""
    return interval([one / other for one, other in zip(rounds[upper], rounds[lower], strict=True)])


def medians(rounds: Rounds) -> dict[str, float]:
    """Return the median of each arm by name."""
    return {name: statistics.median(values) for name, values in rounds.items()}


def faster(rounds: Rounds, figure: str = "seconds", **detail: Any) -> Measured:
    """Return how many times as fast the second arm is as the first, by the seconds of both.

    The detail has the median seconds of every arm under the name `figure`.
    """
    a, b, *_ = rounds
    return Measured(ratio(rounds, a, b), "times as fast", a, b, {figure: medians(rounds), **detail})


def exactly(value: float) -> Interval:
    """Return an interval without width, of a value that was counted and not measured."""
    return Interval(value, value, value)


def timed(work: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return a function that gives the seconds of one call of `work`, from as many calls as take long enough to time.

    The first calls, which may allocate or compile, are made here.
    """
    work()
    once_s = seconds_of(work, device.type, 2)
    times = max(1, min(MOST_TIMES, round(LONG_ENOUGH_S / max(once_s, 1e-9))))
    return partial(seconds_of, work, device.type, times)


def arm_name(words: Sequence[str]) -> str:
    """Return the name of an arm that differs from the other one by these words of a recipe."""
    return " ".join(words) or "as it is"


def one_of(name: str, value: str, known: Sequence[str]) -> str:
    """Return `value`, a setting of the probe. Raises WrongUse if it is none of `known`."""
    if value not in known:
        raise WrongUse(f"the probe's setting {name}={value} is none of {', '.join(known)}")
    return value


def apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return the result of a module's `function` in a new process, with this one's folder and number of threads.

    Raises what it raises of this program's errors, RunFailed where it fails otherwise, and CannotRun where the process dies.
    """
    with ChildProcess(function.__module__, _answer, os.getcwd(), torch.get_num_threads(), function, arguments, named) as child:
        return cast(T, child.answer())


def in_own_process(probe: Callable[..., Measured]) -> Callable[..., Measured]:
    """Return the probe as one that is carried out in a new process."""
    @wraps(probe)
    def measure(context: Context, **settings: Any) -> Measured:
        return apart(probe, replace(context, arena=None), **settings)  # type: ignore[arg-type]

    return measure


def _answer(sender: Connection, folder: str, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...],
            named: dict[str, Any]) -> None:
    torch.set_num_threads(threads)
    with answering(sender, folder, function.__module__):
        sender.send(function(*arguments, **named))


@contextlib.contextmanager
def answering(sender: Connection, folder: str, name: str) -> Iterator[None]:
    """Answer the parent of this process inside, in its folder; an error is sent instead of an answer."""
    be_silent()
    os.chdir(folder)                         # the server may have been started elsewhere
    with sender:
        try:
            yield
        except UserError as error:
            sender.send(error)
        except Exception as error:           # the sentence can be sent to the parent, the traceback cannot
            sender.send(RunFailed(f"{name} failed: {type(error).__name__}: {error}"))


@dataclass
class Training:
    prepared: Prepared
    setup: Setup
    state: State

    def steps(self, count: int, max_grad_norm: float | None = None) -> Iterator[StepResult]:
        """Yield the next `count` optimizer steps, at a constant learning rate."""
        recipe = self.prepared.recipe
        schedule = Schedule("constant", recipe.learning_rate, self.state.step + count)
        return train(self.setup, self.state, schedule, recipe.max_grad_norm if max_grad_norm is None else max_grad_norm)

    def advance(self, count: int, max_grad_norm: float | None = None) -> None:
        """Take `count` steps."""
        for _ in self.steps(count, max_grad_norm):
            pass

    def step_s(self, count: int) -> float:
        """Return the seconds of one of the next `count` steps."""
        return seconds_of(lambda: self.advance(count), self.setup.device.type) / count


def open_training(words: Sequence[str], cache: Path, *, warm_up: int = WARM_UP) -> Training:
    """Return a training of the recipe with its plan in force, after a few steps. Raises WrongUse if it cannot be trained.

    The processes of torch.distributed's group, if this process has joined one, share the steps.
    """
    ranks = joined()
    prepared = agreed(ranks, prepare(resolve_words(words), cache, nobody, processes=ranks.world))
    setup = build_setup(prepared).shared_by(ranks)
    training = Training(prepared, setup, new_state(setup, prepared.recipe.weight_decay))
    training.advance(warm_up)
    return training
