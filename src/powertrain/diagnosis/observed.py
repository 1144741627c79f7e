"""The figures of a run from which its bound is derived: a probe fills them, and so can the events of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from powertrain.records.findings import Cure


class Bound(StrEnum):
    """What a run can be bound by."""

    DATA = "data"
    OVERHEAD = "host overhead"
    COMPUTE = "compute"
    BANDWIDTH = "memory bandwidth"
    CAPACITY = "memory capacity"
    PADDING = "padding"
    EVALUATION = "evaluation"
    CHECKPOINTING = "checkpointing"
    LOGGING = "logging"
    RECOMPILATION = "recompilation"
    THROTTLING = "throttling"
    BUSY = "busy machine"
    THREADS = "too few threads"
    SPLIT = "device split"


@dataclass(frozen=True)
class Between:
    """Work that a run does between two steps, at an interval."""

    key: str                                 # of the recipe, that says how often: "eval_steps"
    seconds: float                           # each time
    every: int                               # steps; 0 = never

    def times(self, steps: int) -> int:
        """Return how often a run of so many steps does it, without the time after the last step, which every run has."""
        return (steps - 1) // self.every if self.every > 0 else 0

    def per_step_s(self, steps: int) -> float:
        return self.seconds * self.times(steps) / max(1, steps)


@dataclass(frozen=True)
class Remedy:
    """A change of the recipe against one cause, and its known effect."""

    against: Bound
    cure: Cure
    speed: float | None = None               # times as fast a step was with it; None: it was not tried
    kept: float | None = None                # of what the cause takes, the share (0..1) that stays, by formula; None: unknown
    basis: str = ""                          # what `speed` or `kept` rests on: "measured: ...", "formula: ..."


@dataclass(frozen=True)
class Observed:
    """The figures of a run. An unknown figure keeps its default, which holds nothing back."""

    step_s: tuple[float, ...]                # of each step, in order; the first ones, which allocate and compile, left out
    parts: Mapping[str, float]               # seconds of a step on average: data, copy, forward, backward, optimizer
    steps: int                               # of the whole run
    # work of a step; FLOPs as the machine computes them, padding and recomputation included
    dtype: str = "fp32"                      # of the matrix products
    flops: float | None = None
    padding_flops: float = 0.0
    recompute_flops: float = 0.0
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)      # measured, by dtype, on all cores
    moved_bytes: float | None = None         # between the products, and by the optimizer
    bandwidth_bytes_per_s: float | None = None
    passes: float = 1.0                      # forward passes of a step
    pass_s: float | None = None              # that a pass takes however few tokens it has; None: unknown
    real_tokens: float = 0.0                 # of a step
    padding_tokens: float = 0.0
    step_slots: tuple[float, ...] = ()       # tokens and padding of each step, in order; (): they are alike
    recomputing_is_needed: bool = False      # the memory would not hold the step without it
    # the machine meanwhile
    threads: int | None = None               # that compute, on a CPU; None: another device does
    cores: int = 1
    stolen_share: float = 0.0                # of the computing threads' time, that other processes' work took
    others_cores: float = 0.0                # that other processes kept busy
    throttled_share: float = 0.0             # of the time, in which a limit of the system (a CPU quota, a GPU's heat) held it
    throttled_by: str = ""                   # that limit, in words
    split_over: int = 1                      # devices that hold parts of the model, working one after the other
    # between the steps
    evaluation: Between | None = None
    checkpoint: Between | None = None
    logging: Between | None = None
    recompilations: int = 0                  # after the first step, while the steps were watched
    recompile_s: float = 0.0                 # that they take in the whole run
    remedies: tuple[Remedy, ...] = ()

    @property
    def between(self) -> Mapping[Bound, Between]:
        """Return cause -> what the run does between steps, as far as the run ever does it."""
        named = {Bound.EVALUATION: self.evaluation, Bound.CHECKPOINTING: self.checkpoint, Bound.LOGGING: self.logging}
        return {name: part for name, part in named.items() if part is not None and part.times(self.steps)}
