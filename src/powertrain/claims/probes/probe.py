"""The parts of every probe: its context and result, timing in turns A B B A, a process of its own, and a training in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from powertrain.evidence.stats import interval
from powertrain.records import RunFailed, WrongUse
from powertrain.records.evidence import Interval

if TYPE_CHECKING:
    from powertrain.evidence.clock import Arena
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TypeVar

from powertrain.evidence.arms import process_context
from powertrain.evidence.worker import be_silent, wait_for
from powertrain.recipe import resolve_words
from powertrain.records import UserError
from powertrain.run.prepare import Prepared, build_setup, prepare
from powertrain.training.loop import State, StepResult, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

FEWEST = 5                                   # repeats that a median with an interval is made of
REPEATS = 6                                  # A B, B A, A B, B A, A B, B A
LONG_ENOUGH_S, MOST_TIMES = 0.1, 1000        # of something short, done so often in a row

Rounds = list[tuple[float, ...]]             # for each repeat one value of each arm, in the order of the arms


@dataclass(frozen=True)
class Context:
    cache: Path                              # token stores and the machine's peaks
    deadline: float                          # by time.monotonic(): begin no further repeat after it
    arena: Arena                             # for arms of `train`
    folder: Path                             # to write into; the caller removes it


@dataclass(frozen=True)
class Measured:
    value: Interval
    unit: str                                # "times as fast", "of the step's time", ...
    a: str                                   # the arms, in words
    b: str
    detail: Mapping[str, Any]                # plain JSON: what the value was made of


class OutOfTime(RunFailed):
    """The deadline came before there were enough repeats for a result."""


def by_turns(arms: Sequence[Callable[[], float]], deadline: float, repeats: int = REPEATS) -> Rounds:
    """Run each arm `repeats` times: all in order, then all in reverse, so that a machine that drifts favours none.

    After `deadline` no repeat is begun; with fewer than five done raises OutOfTime.
    """
    rounds: Rounds = []
    while len(rounds) < repeats:
        if time.monotonic() > deadline:
            if len(rounds) >= FEWEST:
                break
            raise OutOfTime(f"there was time for {len(rounds)} repeats, and {FEWEST} are the fewest that say anything; give it "
                            "a larger --budget")
        found = [0.0] * len(arms)
        for index in range(len(arms)) if len(rounds) % 2 == 0 else reversed(range(len(arms))):
            found[index] = arms[index]()
        rounds.append(tuple(found))
    return rounds


def ratio(rounds: Rounds, upper: int, lower: int) -> Interval:
    """Return arm `upper` over arm `lower`, repeat by repeat."""
    return interval([values[upper] / values[lower] for values in rounds])


def medians(rounds: Rounds, names: Sequence[str]) -> dict[str, float]:
    """Return the median of each arm by name."""
    return {name: statistics.median(values[index] for values in rounds) for index, name in enumerate(names)}


def exactly(value: float) -> Interval:
    """Return an interval without width, of a value that was counted and not measured."""
    return Interval(value, value, value)


def seconds_of(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Return the seconds of one of `times` calls in a row."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return (time.perf_counter() - began) / times


def enough_times(work: Callable[[], object], device: torch.device) -> int:
    """Return how many calls of `work` in a row take long enough to time. The first calls, which may allocate, are made here."""
    work()
    once_s = seconds_of(work, device, 2)
    return max(1, min(MOST_TIMES, round(LONG_ENOUGH_S / max(once_s, 1e-9))))


def fastest_device() -> torch.device:
    """Return the device on which a run would train: CUDA, MPS or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def one_of(name: str, value: str, known: Sequence[str]) -> str:
    """Return `value`, a setting of the probe. Raises WrongUse if it is none of `known`."""
    if value not in known:
        raise WrongUse(f"the probe's setting {name}={value} is none of {', '.join(known)}")
    return value


T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return the result of a module's `function` in a new process, with this one's folder and number of threads.

    Raises what it raises of this program's errors, and RunFailed where the process failed or died.
    """
    context = process_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, os.getcwd(), torch.get_num_threads(), function, arguments, named))
    process.start()
    sender.close()
    try:
        error, value = receiver.recv()
    except EOFError:
        process.join()
        raise RunFailed(f"the process of {function.__module__} ended with code {process.exitcode} and no answer; was it "
                        "killed for its memory?") from None
    except BaseException:
        process.kill()
        raise
    finally:
        receiver.close()
    process.join()
    if error is not None:
        raise error
    result: T = value
    return result


def _answer(sender: Connection, folder: str, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...],
            named: dict[str, Any]) -> None:
    be_silent()
    os.chdir(folder)                         # the server may have been started elsewhere
    torch.set_num_threads(threads)
    try:
        sender.send((None, function(*arguments, **named)))
    except UserError as error:
        sender.send((error, None))
    except Exception as error:               # its sentence crosses the border, its traceback cannot
        sender.send((RunFailed(f"{function.__module__} failed: {type(error).__name__}: {error}"), None))
    finally:
        sender.close()


WARM_UP = 4                                  # steps before anything is timed


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

    def advance(self, count: int) -> None:
        """Take `count` steps."""
        for _ in self.steps(count):
            pass

    def step_s(self, count: int) -> float:
        """Return the seconds of one of the next `count` steps."""
        return seconds_of(lambda: self.advance(count), self.setup.device) / count

    @property
    def examples_per_step(self) -> int:
        return self.setup.train_batch_size


def open_training(words: Sequence[str], cache: Path, *, warm_up: int = WARM_UP) -> Training:
    """Return a training of the recipe with its plan in force, after a few steps. Raises WrongUse if it cannot be trained."""
    prepared = prepare(resolve_words(words), cache, quiet)
    setup = build_setup(prepared)
    training = Training(prepared, setup, new_state(setup, prepared.recipe.weight_decay))
    training.advance(warm_up)
    return training


def quiet(text: str) -> None:
    """Ignore the progress messages of `prepare`."""
