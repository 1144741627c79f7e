"""Parity: whether two arms learn the same, as the exactness of their difference demands.

  BITWISE    every loss and every gradient norm is the same number
  ROUNDING   losses and gradient norms stay within the rounding of the type that they were computed in
  LOSSY      over several seeds the final loss is no worse than without, beyond what the seeds differ by

Gradient norms are looked at beside losses because they show what a loss hides: a scaled loss, a part of the model that
no longer learns. A changed learning rate shows in neither at the first step, so several steps are compared.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.evidence.worker import Probe
from powertrain.records.evidence import Parity

LEAST_STEPS = 3
LEAST_SEEDS = 2


@dataclass(frozen=True)
class Tolerance:
    """The relative differences that rounding explains."""

    loss: float                              # largest of a step
    grad_norm: float                         # largest of a step
    mean_grad_norm: float                    # on average of the steps, with its sign
    why: str


# fp32 has 24 bits: 6e-8 a rounding. Sums over a batch in another order are off by about 1e-6 of a loss, and the first
# updates of Adam, which divides by small numbers, multiply that; 1e-4 is a hundred times as much, and a fiftieth of what
# 2 % fewer tokens do. bf16 has 8 bits, 4e-3 a rounding, fp16 and TF32 11 bits, 5e-4; losses average over many roundings,
# and the norm of a gradient sums their squares, which do not cancel. They have no direction, though: from step to step
# norms are too large as often as too small, where a scaled gradient is always too large.
IN_FP32 = Tolerance(1e-4, 1e-3, 1e-3, "fp32 sums in another order")
IN_HALF = Tolerance(1e-2, 5e-2, 1e-2, "products of 8 to 11 bits")


def compare_losses(exactness: str, a: Probe | Sequence[Probe], b: Probe | Sequence[Probe], *, dtype: str) -> Parity:
    """Compare B with A over the steps that both have. `dtype` is of the products of the arm that rounds more.

    For LOSSY, `a` and `b` are runs from the same several seeds. Raises ValueError where there is too little to compare.
    """
    runs_a, runs_b = (list(runs) if isinstance(runs, Sequence) else [runs] for runs in (a, b))
    if exactness == "LOSSY":
        return _no_worse(runs_a, runs_b)
    steps = min(len(runs_a[0].losses), len(runs_b[0].losses))
    if steps < LEAST_STEPS:
        raise ValueError(f"parity needs {LEAST_STEPS} steps of both arms, and there are {steps}: the first says nothing of "
                         "the update")
    loss, norm = _largest(runs_a[0].losses, runs_b[0].losses), _largest(runs_a[0].grad_norms, runs_b[0].grad_norms)
    shown = f"over {steps} steps losses differ by at most {loss:.2g} and gradient norms by {norm:.2g}, relative"
    if exactness == "BITWISE":
        holds = loss == 0 == norm
        return Parity(exactness, holds, f"{shown}; {'every one is' if holds else 'it should be'} the same number", steps, loss,
                      norm)
    if exactness != "ROUNDING":
        raise ValueError(f"an exactness {exactness!r} is not known: BITWISE, ROUNDING or LOSSY")
    allowed = IN_FP32 if dtype == "fp32" else IN_HALF
    mean = statistics.mean(math.copysign(_apart(x, y), y - x)       # with its sign
                           for x, y in zip(runs_a[0].grad_norms, runs_b[0].grad_norms, strict=False))
    holds = loss <= allowed.loss and norm <= allowed.grad_norm and abs(mean) <= allowed.mean_grad_norm
    return Parity(exactness, holds, f"{shown}, the norms by {mean:+.2g} on average; {allowed.why} explain {allowed.loss:g}, "
                  f"{allowed.grad_norm:g} and {allowed.mean_grad_norm:g}", steps, loss, norm)


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest relative difference of a step; infinite where only one of the two is finite."""
    return max((_apart(x, y) for x, y in zip(a, b, strict=False)), default=0.0)


def _apart(x: float, y: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return abs(x - y) / max(abs(x), abs(y))


def _no_worse(a: Sequence[Probe], b: Sequence[Probe]) -> Parity:
    if len(a) < LEAST_SEEDS or len(a) != len(b):
        raise ValueError(f"a technique that is not exact needs runs of both arms from the same seeds, at least {LEAST_SEEDS}; "
                         f"there are {len(a)} and {len(b)}")
    ends_a, ends_b = ([final_loss(run.losses) for run in runs] for runs in (a, b))
    mean_a, mean_b, spread = statistics.mean(ends_a), statistics.mean(ends_b), statistics.stdev(ends_a)
    steps = min(len(run.losses) for run in (*a, *b))
    because = f"over {len(a)} seeds the loss after {steps} steps is {mean_b:.4f}, and {mean_a:.4f} without it, where seeds " \
              f"differ by {spread:.4f}"
    norms = max(_largest(one.grad_norms, other.grad_norms) for one, other in zip(a, b, strict=True))
    return Parity("LOSSY", mean_b <= mean_a + spread, because, steps, abs(_apart(mean_a, mean_b)), norms)


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean loss of the last quarter of steps, because the loss of one step depends on its batch."""
    return statistics.mean(losses[-max(1, len(losses) // 4):])
