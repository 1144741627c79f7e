"""The figures of a run, and the share of its time that each possible bound takes: filled by a probe, or from stored events.

A step's matrix products take at least their FLOPs at the measured peak; the operators between them take at least their bytes
at the measured bandwidth. The rest of the computing time is overhead: starting operators, and products too small for the
peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from statistics import mean, median
from typing import Any

from powertrain import planner
from powertrain.cost.estimate import MOVED_SHARE, workload_work
from powertrain.diagnosis.wording import filled, sentences
from powertrain.records import Facts, Plan, UnknownFact
from powertrain.records.findings import Cure

SLOWED = 1.15                # times as long as at the beginning: steps that take this much longer later were slowed down
LEAST_STEPS_FOR_TREND = 12   # four in each third


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
    COMMUNICATION = "communication"
    IMBALANCE = "imbalance"


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
    parts: Mapping[str, float]               # seconds of a step on average: data, copy, forward, backward, ...
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
    # of several processes, seconds of a step
    exchange_s: float = 0.0                  # that the sums take
    waiting_s: float = 0.0                   # that a process waits for the slowest one, on average
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

    # -------------------------------------------------------------------------------------------- seconds of a step

    @cached_property
    def mean_step_s(self) -> float:
        """Return the mean seconds of a step."""
        return mean(self.step_s)

    @cached_property
    def computing_s(self) -> float:
        """Return the seconds of a step that neither wait for data or other processes nor copy anything."""
        return max(0.0, self.mean_step_s - sum(self.parts.get(part, 0.0) for part in ("data", "copy", "communication")))

    @cached_property
    def floors_s(self) -> tuple[float, float]:
        """Return the seconds of a step that its products and its memory traffic explain, at most its computing time."""
        if self.flops is None or self.dtype not in self.peak_flops_per_s:
            return self.computing_s, 0.0
        products_s = self.flops / self.peak_flops_per_s[self.dtype] / self.threads_share     # the peak is that of all cores
        traffic_s = (self.moved_bytes or 0.0) / self.bandwidth_bytes_per_s if self.bandwidth_bytes_per_s else 0.0
        scale = min(1.0, self.computing_s / (products_s + traffic_s))
        return products_s * scale, traffic_s * scale

    @cached_property
    def overhead_s(self) -> float:
        """Return the computing seconds of a step that neither products, memory traffic nor other processes explain."""
        own_s = self.computing_s * (1 - max(self.stolen_share, self.throttled_share))
        return max(0.0, own_s - sum(self.floors_s))

    @property
    def threads_share(self) -> float:
        """Return the computing threads as a share of the cores that they may use; 1 on other devices."""
        return 1.0 if self.threads is None else min(1.0, self.threads / self.cores)

    @cached_property
    def slowed_share(self) -> float:
        """Return the share by which late steps take longer than early ones; 0 where they take the same time.

        Steps with different numbers of tokens are compared by the time of a token. Medians of thirds are compared: single slow
        steps are the work of other processes, but a limit of heat or power slows all steps that follow.
        """
        slots = self.step_slots or (1.0,) * len(self.step_s)
        each = [taken / max(1.0, count) for taken, count in zip(self.step_s, slots, strict=True)]
        if len(each) < LEAST_STEPS_FOR_TREND:
            return 0.0
        third = len(each) // 3
        parts = [sorted(part) for part in (each[:third], each[third:-third], each[-third:])]
        early, middle, late = map(median, parts)
        apart = parts[2][third // 4] > parts[0][-1 - third // 4]
        return 1 - early / late if apart and early <= middle <= late and late >= SLOWED * early else 0.0

    # -------------------------------------------------------------------------------------------- shares of the run

    @cached_property
    def wall_s(self) -> float:
        """Return the mean seconds of a step, with its part of the work between steps."""
        pauses_s = sum(part.per_step_s(self.steps) for part in self.between.values())
        return self.mean_step_s + self.recompile_s / max(1, self.steps) + pauses_s

    @cached_property
    def shares(self) -> Mapping[Bound, float]:
        """Return the share (0..1) of `wall_s` that each bound has."""
        passes_s = sum(self.parts.get(part, 0.0) for part in ("forward", "backward")) or self.computing_s
        # steps that other processes lengthen are not called throttled
        throttled = max(self.throttled_share, 0.0 if self.stolen_share else self.slowed_share)
        found = {Bound.DATA: self.parts.get("data", 0.0) + self.parts.get("copy", 0.0), Bound.COMPUTE: self.floors_s[0],
                 Bound.BANDWIDTH: self.floors_s[1], Bound.OVERHEAD: self.overhead_s,
                 Bound.BUSY: self.computing_s * self.stolen_share, Bound.THROTTLING: self.computing_s * throttled,
                 Bound.SPLIT: self.computing_s * (1 - 1 / self.split_over)}
        if self.flops:
            found[Bound.CAPACITY] = passes_s * self.recompute_flops / self.flops
        if slots := self.real_tokens + self.padding_tokens:
            found[Bound.PADDING] = passes_s * self.padding_tokens / slots
        if self.threads_share < 1:
            found[Bound.THREADS] = self.computing_s * (1 - self.threads_share)
        found |= {name: part.per_step_s(self.steps) for name, part in self.between.items()}
        if self.exchange_s:
            found |= {Bound.COMMUNICATION: self.exchange_s, Bound.IMBALANCE: self.waiting_s}
        if self.recompilations:
            found[Bound.RECOMPILATION] = self.recompile_s / max(1, self.steps)
        return {name: min(1.0, taken_s / self.wall_s) for name, taken_s in found.items()}

    def evidence(self, bound: Bound) -> str:
        """Return the figures that speak for a bound, as a sentence of bounds.toml."""
        case = bound.name.lower()
        if bound in (Bound.COMPUTE, Bound.BANDWIDTH, Bound.OVERHEAD) and (
                self.flops is None or self.dtype not in self.peak_flops_per_s):
            case = "uncounted"
        elif bound == Bound.THROTTLING and self.throttled_share > self.slowed_share:
            case = "held_by_a_limit"
        pause = self.between.get(bound) or Between("", 0.0, 0)
        text: str = filled(sentences()["bound"][case]["evidence"], {
            **vars(self), "step_s": self.mean_step_s, "data_s": self.parts.get("data", 0.0),
            "copy_s": self.parts.get("copy", 0.0), "overhead_s": self.overhead_s, "products_s": self.floors_s[0],
            "traffic_s": self.floors_s[1], "gflop": (self.flops or 0) / 1e9, "moved_bytes": self.moved_bytes or 0,
            "peak_tflops": self.peak_flops_per_s.get(self.dtype, 0.0) / 1e12, "slower": 1 / (1 - self.slowed_share),
            "in_passes": "" if self.passes <= 1 else f" in {self.passes:.3g} passes", "pause_s": pause.seconds,
            "slots": self.real_tokens + self.padding_tokens, "every": pause.every, "key": pause.key,
            "recomputed": self.recompute_flops / self.flops if self.flops else 0.0,
            "fits": "does not fit" if self.recomputing_is_needed else "fits"})
        return text


def passes_of(facts: Facts, plan: Plan) -> float:
    """Return the passes of a step."""
    workload = planner.workload_of(facts, plan)
    return float(workload.micro_batches if workload.packed_tokens is None else -(-workload.tokens // workload.packed_tokens))


def step_work(facts: Facts, plan: Plan, real_tokens: float, padding_tokens: float) -> dict[str, Any]:
    """Return the work of one step as fields of Observed; only tokens and dtype where the model's work is not counted."""
    workload = planner.workload_of(facts, plan)
    known: dict[str, Any] = {"real_tokens": real_tokens, "padding_tokens": padding_tokens, "dtype": workload.dtype}
    try:
        work = workload_work(facts.model, workload)
    except UnknownFact:
        return known
    needed = work.flops * real_tokens / work.tokens
    slots = (real_tokens + padding_tokens) / (work.tokens / (1 - workload.padding_share))    # over the expected slots
    padding, recomputed = needed * padding_tokens / real_tokens, work.recompute_flops * slots
    between = MOVED_SHARE.get(facts.hardware.device, 1.0) * work.elementwise_bytes * slots
    return {**known, "flops": needed + padding + recomputed, "padding_flops": padding, "recompute_flops": recomputed,
            "moved_bytes": between + work.optimizer_bytes}
