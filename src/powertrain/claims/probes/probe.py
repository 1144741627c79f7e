"""What a probe is given and what it gives, and how it times: its arms by turns, A B B A, from one wait to the next."""

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
    """The deadline came before there were enough repeats to say anything."""


def by_turns(arms: Sequence[Callable[[], float]], deadline: float, repeats: int = REPEATS) -> Rounds:
    """Each arm `repeats` times: all in order, then all in reverse, so that a machine that drifts favours none.

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
    """Arm `upper` over arm `lower`, repeat by repeat."""
    return interval([values[upper] / values[lower] for values in rounds])


def medians(rounds: Rounds, names: Sequence[str]) -> dict[str, float]:
    """Of each arm, by name."""
    return {name: statistics.median(values[index] for values in rounds) for index, name in enumerate(names)}


def exactly(value: float) -> Interval:
    """What was counted, not measured."""
    return Interval(value, value, value)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Of one of `times` calls in a row."""
    wait(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait(device)
    return (time.perf_counter() - began) / times


def enough_times(work: Callable[[], object], device: torch.device) -> int:
    """How many calls of `work` in a row take long enough to be timed; makes the first ones, which may allocate."""
    work()
    once_s = seconds_of(work, device, 2)
    return max(1, min(MOST_TIMES, round(LONG_ENOUGH_S / max(once_s, 1e-9))))


def fastest_device() -> torch.device:
    """Where a run would train: CUDA, MPS or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def one_of(name: str, value: str, known: Sequence[str]) -> str:
    """`value`, a probe's setting. Raises WrongUse if it is none of `known`."""
    if value not in known:
        raise WrongUse(f"the probe's setting {name}={value} is none of {', '.join(known)}")
    return value
