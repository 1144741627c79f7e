"""The values of a measurement: what was compared, what was seen, and what that says. `studies/` holds them as JSON.

An arm is one side of a comparison: a complete recipe with a complete plan, in a process of its own. Speed is real (not
padding) tokens per second, and a ratio of speeds above 1 means that the second arm is faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# what a comparison of speeds says
FASTER, NO_EFFECT, HARMFUL, INCONCLUSIVE, INVALID = "faster", "no effect", "harmful", "inconclusive", "invalid"
# what a measurement says of a claim, besides no effect, harmful and inconclusive
CONFIRMED, BETTER, SMALLER, NOT_HERE = "confirmed", "better", "smaller than claimed", "not applicable here"


@dataclass(frozen=True)
class Arm:
    name: str                                # "full plan", "without packing"
    words: tuple[str, ...]                   # RECIPE and KEY=VALUE words, as after `powertrain train`
    plan: Mapping[str, Any] | None = None    # as in plan.json; None: what the planner says for these words


@dataclass(frozen=True)
class Window:
    """Some optimizer steps in a row, timed from one wait for the device to the next."""

    first_step: int                          # from 1
    steps: int
    seconds: float
    trained_tokens: int
    real_tokens: int                         # not padding
    padding_tokens: int
    parts: Mapping[str, float]               # seconds by part (training/setup.py), summed over the window

    @property
    def tokens_per_s(self) -> float:
        return self.real_tokens / self.seconds


@dataclass(frozen=True)
class ArmRun:
    """What one process of an arm did."""

    arm: str
    ready_s: float                           # from the process's start until the plan was in force
    first_step_s: float                      # the first step, with whatever it compiles or allocates
    warm_up_steps: int
    windows: tuple[Window, ...]
    losses: tuple[float, ...]                # of every step from the first, warm-up included
    grad_norms: tuple[float, ...]
    peak_memory_bytes: int                   # most memory in use: allocated on a GPU, resident on a CPU
    techniques: tuple[str, ...] = ()         # that were confirmed to be in force


@dataclass(frozen=True)
class Interval:
    """A median with the interval that holds it with 95 % probability, by bootstrap."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Parity:
    """Whether two arms learn the same, as the exactness of what differs between them demands."""

    demanded: str                            # "BITWISE", "ROUNDING" or "LOSSY"
    holds: bool
    because: str                             # the largest differences, with their tolerances
    steps: int                               # that were compared
    loss_difference: float                   # largest of a step, relative
    grad_norm_difference: float


@dataclass(frozen=True)
class Comparison:
    """Arm B against arm A."""

    a: str
    b: str
    speed: Interval | None                   # tokens per second, B over A; None where a run had no speed
    pairs: int                               # of windows, one of each arm, over the same steps
    verdict: str                             # FASTER, NO_EFFECT, HARMFUL, INCONCLUSIVE or INVALID
    because: str                             # in words, with the numbers
    tokens_per_s: tuple[float, float]        # medians of A and B
    peak_memory_bytes: tuple[int, int]       # of A and B
    compile_s: float = 0.0                   # how much longer B takes until it runs at its speed
    break_even_steps: int | None = None      # after which B has earned that back; None: it never does, or owes nothing
    parity: Parity | None = None


@dataclass(frozen=True)
class Study:
    """One measurement, as `studies/<date>_<what>/evidence.json` holds it; facts.json lies beside it."""

    name: str                                # of the folder
    kind: str                                # "ablation", "tuning", "comparison", "claims", "bench", "speed", "diagnosis"
    what: str                                # one sentence
    date: str                                # 2026-11-21
    command: str                             # that makes it again
    commit: str | None                       # of powertrain, with "+" behind it where files were changed; None: unknown
    machine: Mapping[str, Any]               # name, device, cores, memory_bytes, fingerprint, load
    versions: Mapping[str, str]
    arms: tuple[Arm, ...] = ()
    runs: tuple[ArmRun, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    noise_floor: float | None = None         # of the A/A pair: what this machine cannot tell apart, as a share
    findings: Mapping[str, Any] = field(default_factory=dict)     # what the kind adds; see evidence/studies.py
    seconds: float = 0.0                     # that the measurement took
