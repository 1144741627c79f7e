"""How the processes of a run share its steps: who waits, who computes more than the others, and who holds them up.

A process's own time of a step ends where the first sum begins: data, copy, forward and backward. After that it waits for the
slowest process, so its waiting time shows that it is held up, and not that it is slow. Each process keeps its own times; they
are exchanged where the run reads its steps (logging_steps), so no step has a collective for them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from powertrain.records.events import Straggler
from powertrain.records.timeline import quantile
from powertrain.training.setup import COMMUNICATION

OWN = ("data", "copy", "forward", "backward")
SLOW = 1.2                   # times the median process's time: from there on a process is slow
# Single steps say little: another program takes a core from one of two equal processes for a while, often for three steps and
# more. So a process is slow in a stretch of steps if it is slow in most of them, and is named after some stretches in a row.
STRETCH_STEPS, STRETCH_S = 10, 1.0           # a stretch has at least so many steps, and lasts at least so long
MOST = 0.75                  # of the steps of a stretch
STRETCHES = 3                # in a row
SHORTEST_S = 1e-9            # of a median time that something is divided by: a process without a pass may take none


@dataclass(frozen=True)
class OwnStep:
    """One process's part of a step."""

    tokens: int                              # that it computed, padding included
    parts: Mapping[str, float]               # seconds of each part, with its communication

    @property
    def own_s(self) -> float:
        """Return the seconds until the first sum."""
        return sum(self.parts.get(part, 0.0) for part in OWN)


SharedStep = Sequence[OwnStep]               # the parts of all processes, in the order of ranks


def shares_of(step: SharedStep) -> dict[str, Any]:
    """Return the fields of a step's event that are about several processes; none for one process.

    The process that waits least waits for the exchange alone, and the others for the slowest process besides.
    """
    if len(step) == 1:
        return {}
    step_s = sum(step[0].parts.values())
    waits_s = [own.parts.get(COMMUNICATION, 0.0) for own in step]
    return {"communication_share": min(waits_s) / step_s, "waiting_share": (fmean(waits_s) - min(waits_s)) / step_s,
            "token_imbalance": max(own.tokens for own in step) / fmean(own.tokens for own in step)}


def slowness(step: SharedStep) -> list[float]:
    """Return how many times the median process's time each process took, as far as its tokens do not explain it.

    It is the smaller of two ratios, of times and of times per token. A process that computes more tokens than the others takes
    longer, and one with a few short passes takes longer per token: neither of them is slow.
    """
    own_s = [own.own_s for own in step]
    per_token_s = [own.own_s / own.tokens if own.tokens else 0.0 for own in step]
    usual_s = max(SHORTEST_S, median(own_s))
    usual_per_token_s = max(SHORTEST_S, median([one for one in per_token_s if one] or [0.0]))
    return [min(one / usual_s, each / usual_per_token_s) for one, each in zip(own_s, per_token_s, strict=True)]


@dataclass
class StragglerWatch:
    """Finds the processes that hold the others up, stretch by stretch."""

    _stretch: list[SharedStep] = field(default_factory=list)
    _stretch_s: float = 0.0
    _slow_stretches: dict[int, int] = field(default_factory=dict)    # rank -> in a row, until now

    def take(self, step: SharedStep) -> Iterator[Straggler]:
        """Yield the processes that this step shows to be slow; each once, until it has been as fast as the others again."""
        self._stretch.append(step)
        self._stretch_s += sum(step[0].parts.values())
        if len(self._stretch) < STRETCH_STEPS or self._stretch_s < STRETCH_S:
            return
        stretch, self._stretch, self._stretch_s = self._stretch, [], 0.0
        by_rank = zip(*map(slowness, stretch), strict=True)
        slow = [rank for rank, times in enumerate(by_rank) if quantile(times, 1 - MOST) > SLOW]
        self._slow_stretches = {rank: self._slow_stretches.get(rank, 0) + 1 for rank in slow}
        yield from (_straggler(rank, stretch) for rank in slow if self._slow_stretches[rank] == STRETCHES)


def _straggler(rank: int, stretch: Sequence[SharedStep]) -> Straggler:
    def usual(part: str) -> float:
        return median(own.parts.get(part, 0.0) for own in itertools.chain(*stretch))

    later_s = {part: median(step[rank].parts.get(part, 0.0) for step in stretch) - usual(part) for part in OWN}
    return Straggler(rank=rank, part=max(later_s, key=lambda part: later_s[part]),
                     own_s=median(step[rank].own_s for step in stretch),
                     usual_s=median(median(own.own_s for own in step) for step in stretch))
