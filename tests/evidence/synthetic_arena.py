"""An arena whose clock is made up: how fast a plan is, and how noisy the machine, is said by the test.

What a comparison makes of its windows is the real thing (stats.py), and so can probes be: in this process, by the same
Runner that an arm's process has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from powertrain.evidence.clock import CannotRun, Pace, Probe
from powertrain.evidence.profile import CLASSES, Profile
from powertrain.evidence.stats import interval, speed_verdict
from powertrain.evidence.worker import Order, Runner, failure
from powertrain.records.evidence import FASTER, Arm, ArmRun, Comparison, Window

Steps = Mapping[str, Mapping[str, Any]]      # technique -> settings
TOKENS = 1000


def steps_of(arm: Arm) -> Steps:
    assert arm.plan is not None
    return {step["technique"]: step["settings"] for step in arm.plan["steps"]}


class SyntheticArena:
    """`step_s` says how long a step of a plan takes, `cannot` why a plan does not run, `losses` what it learns."""

    def __init__(self, step_s: Callable[[Steps], float], *, noise: float = 0.0, seed: int = 0,
                 cannot: Callable[[Steps], str | None] = lambda steps: None,
                 losses: Callable[[Steps], tuple[float, ...]] = lambda steps: (3.0, 2.5, 2.2, 2.0),
                 memory: Callable[[Steps], int] = lambda steps: 1000, compile_s: Callable[[Steps], float] = lambda steps: 0.0,
                 classes: Mapping[str, float] | None = None, real_probes: Path | None = None, takes_s: float = 0.0):
        self.step_s, self.cannot, self.losses, self.memory, self.compile_s = step_s, cannot, losses, memory, compile_s
        self.noise, self.draw, self.real_probes, self.takes_s = noise, np.random.default_rng(seed), real_probes, takes_s
        self.classes = classes or dict.fromkeys(CLASSES, 1 / len(CLASSES))
        self.compared: list[tuple[Steps, Steps]] = []
        self.clock_s = 0.0

    def now(self) -> float:
        return self.clock_s

    def compare(self, a: Arm, b: Arm, pace: Pace | None = None, *, margin: float = 0.02,
                deadline: float | None = None) -> tuple[Comparison, ArmRun, ArmRun]:
        self.compared.append((steps_of(a), steps_of(b)))
        return self._compare(a, b, pace or Pace(), margin)

    def control(self, arm: Arm, pace: Pace | None = None, deadline: float | None = None) -> tuple[Comparison, ArmRun, ArmRun]:
        return self._compare(arm, Arm(f"{arm.name} again", arm.words, arm.plan), pace or Pace(), 0.02)

    def probe(self, arm: Arm, *, steps: int = 4, precision: str | None = None, seed: int | None = None) -> Probe:
        if self.real_probes is not None:
            try:
                folder = str(self.real_probes)
                return Runner(Order(arm, folder, folder, folder, precision=precision, seed=seed)).probe(steps)
            except Exception as error:
                failed = failure(error)
                return Probe((), (), None, str(failed), failed.technique)
        if (why := self.cannot(steps_of(arm))) is not None:
            return Probe((), (), None, why, why.partition(":")[0])
        losses = self.losses(steps_of(arm))
        return Probe(losses, tuple(1.0 for _ in losses), self.memory(steps_of(arm)))

    def profile(self, arm: Arm, *, steps: int = 3) -> Profile:
        step_s = self.step_s(steps_of(arm))
        return Profile(step_s, {name: step_s * share for name, share in self.classes.items()})

    def _compare(self, a: Arm, b: Arm, pace: Pace, margin: float) -> tuple[Comparison, ArmRun, ArmRun]:
        self.clock_s += self.takes_s
        for arm in (a, b):
            if (why := self.cannot(steps_of(arm))) is not None:
                raise CannotRun(why)
        runs = [self._run(arm, pace.pairs) for arm in (a, b)]
        speed = interval([second.tokens_per_s / first.tokens_per_s
                          for first, second in zip(runs[0].windows, runs[1].windows, strict=True)])
        verdict, because = speed_verdict(speed, margin)
        compile_s = max(0.0, self.compile_s(steps_of(b)) - self.compile_s(steps_of(a)))
        saved_s = self.step_s(steps_of(a)) - self.step_s(steps_of(b))
        even = round(compile_s / saved_s) if verdict == FASTER and compile_s else None
        rates = tuple(float(np.median([window.tokens_per_s for window in run.windows])) for run in runs)
        return (Comparison(a.name, b.name, speed, pace.pairs, verdict, because, (rates[0], rates[1]), (0, 0), compile_s, even),
                runs[0], runs[1])

    def _run(self, arm: Arm, pairs: int) -> ArmRun:
        step_s = self.step_s(steps_of(arm))
        windows = tuple(Window(index + 1, 1, step_s * float(np.exp(self.noise * self.draw.standard_normal())), TOKENS, TOKENS,
                               0, {}) for index in range(pairs))
        return ArmRun(arm.name, 1.0, step_s, 1, windows, (3.0,), (1.0,), 0, tuple(steps_of(arm)))
