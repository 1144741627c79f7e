"""The times at which torch's compiler ran: a step that compiles again is not comparable with the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

COMPILE_IN = ("forward", "backward")         # the parts of a step in which torch may compile


@dataclass(frozen=True)
class Compilation:
    part: str                                # of the step: "forward", or "backward" where compiling was delayed
    seconds: float


class CompileWatch:
    """`with CompileWatch() as watch:`; `watch.take()` returns the compilations since the last call."""

    def __enter__(self) -> Self:
        self._found: list[Compilation] = []
        self._began = 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def take(self) -> tuple[Compilation, ...]:
        found = tuple(self._found)
        self._found.clear()
        return found

    def _start(self, arguments: CallbackArgs) -> None:
        self._began = time.perf_counter()

    def _end(self, arguments: CallbackArgs) -> None:
        part = "backward" if arguments.callback_trigger is CallbackTrigger.LAZY_BACKWARD else "forward"
        self._found.append(Compilation(part, time.perf_counter() - self._began))


def told_apart(steps: Sequence[Mapping[str, float]], compilations: Sequence[tuple[Compilation, ...]]
               ) -> tuple[tuple[Mapping[str, float], ...], list[tuple[Compilation, ...]]]:
    """Return the steps' parts without compiling, and the compilations with their whole time.

    torch's own figure leaves out guards, the first call of a new graph and garbage collection. So a compiling step is taken to
    need the usual time of the steps that compiled nothing, and the rest is compiling.
    """
    plain = [parts for parts, found in zip(steps, compilations, strict=True) if not found]
    left, taken = [], []
    for parts, found in zip(steps, compilations, strict=True):
        rest = dict(parts)
        for one in found:
            rest[one.part] = max(0.0, rest[one.part] - one.seconds)
        if found and plain:
            rest |= {name: min(rest[name], statistics.median(each[name] for each in plain)) for name in COMPILE_IN}
        told_s, whole_s = sum(one.seconds for one in found), sum(parts.values()) - sum(rest.values())
        left.append(rest)
        taken.append(tuple(replace(one, seconds=one.seconds * whole_s / told_s) for one in found) if told_s else found)
    return tuple(left), taken


def still_to_come_s(per_step: Sequence[tuple[Compilation, ...]], steps_left: int,
                    before: Sequence[tuple[Compilation, ...]] = ()) -> float:
    """Return the seconds of compiling in the remaining steps, at the rate of the later half of the watched steps.

    `before`: the earlier compilations, one entry for the set-up and one for each step.
    """
    lately = per_step[len(per_step) // 2:]
    if not any(lately):
        return 0.0
    every = [one for step in (*before, *per_step) for one in step]
    rate = sum(map(len, lately)) / len(lately)
    left = max(0, most_compilations([*before, *per_step]) - len(every))
    return min(rate * steps_left, float(left)) * statistics.mean(one.seconds for step in per_step for one in step)


def most_compilations(per_step: Sequence[tuple[Compilation, ...]]) -> int:
    """Return how many compilations torch makes at most: after `recompile_limit` kinds of input it runs a function uncompiled.

    The number of functions is the most that were compiled in one step, for one kind of input.
    """
    import torch._dynamo.config

    limit: Any = torch._dynamo.config.recompile_limit
    by_part = [max((sum(one.part == part for one in step) for step in per_step), default=0) for part in COMPILE_IN]
    return int(limit) * sum(by_part)
