"""How a run's wall time divides among the causes that may hold it back, each with what was seen of it.

A step's products take at least their FLOPs at the measured peak, and what lies between them at least its bytes at the
measured bandwidth. What neither explains, and is not waiting for data, is overhead: starting operators, and products too
small to run at the peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from powertrain.diagnosis.observed import (
    BANDWIDTH,
    BUSY,
    CAPACITY,
    COMPUTE,
    DATA,
    OVERHEAD,
    PADDING,
    RECOMPILATION,
    SPLIT,
    THREADS,
    THROTTLING,
    Between,
    Observed,
)
from powertrain.records.findings import Evidence

SLOWED = 1.15                # times as long as at the beginning: steps that take this much longer later were slowed down
LEAST_STEPS_FOR_TREND = 12   # four in each third


@dataclass(frozen=True)
class Shares:
    wall_s: float                            # of a step on average, with its part of what is between the steps
    step_s: float                            # of a step alone
    by_cause: Mapping[str, float]            # cause -> share (0..1) of wall_s
    evidence: Mapping[str, tuple[Evidence, ...]]


def shares_of(observed: Observed) -> Shares:
    step_s, steps = statistics.mean(observed.step_s), observed.steps
    between = observed.between
    seconds = {**_of_step(observed, step_s), **{name: part.per_step_s(steps) for name, part in between.items()}}
    said = {**_said_of_step(observed, step_s), **{name: _said_between(part, step_s) for name, part in between.items()}}
    recompile_s = observed.recompile_s / max(1, steps)
    if observed.recompilations:
        seconds[RECOMPILATION] = recompile_s
        said[RECOMPILATION] = (f"{observed.recompilations} recompilations while the steps were watched; about "
                               f"{_seconds(observed.recompile_s)} of the run")
    wall_s = step_s + recompile_s + sum(part.per_step_s(steps) for part in between.values())
    return Shares(wall_s, step_s, {name: min(1.0, part_s / wall_s) for name, part_s in seconds.items()},
                  {name: (Evidence(text),) for name, text in said.items()})


def floors(observed: Observed, step_s: float) -> tuple[float, float]:
    """Seconds of a step that its products, and the bytes between them, explain; never more than it computes at all."""
    computing_s = computing_seconds(observed, step_s)
    if not is_counted(observed):
        return computing_s, 0.0
    assert observed.flops is not None
    products_s = observed.flops / observed.peak_flops_per_s[observed.dtype]
    if observed.threads is not None and observed.threads < observed.cores:
        products_s *= observed.cores / observed.threads          # the peak is that of all cores
    traffic_s = 0.0
    if observed.moved_bytes is not None and observed.bandwidth_bytes_per_s:
        traffic_s = observed.moved_bytes / observed.bandwidth_bytes_per_s
    scale = min(1.0, computing_s / (products_s + traffic_s))
    return products_s * scale, traffic_s * scale


def is_counted(observed: Observed) -> bool:
    """Whether it is known what the model computes, and how fast this machine computes."""
    return observed.flops is not None and observed.dtype in observed.peak_flops_per_s


def computing_seconds(observed: Observed, step_s: float) -> float:
    """Of a step: what is neither waiting for data nor copying it."""
    return max(0.0, step_s - observed.parts.get("data", 0.0) - observed.parts.get("copy", 0.0))


def overhead_seconds(observed: Observed, step_s: float) -> float:
    """Of a step: what is computed, not explained by products or traffic, and not time that was taken from this process."""
    computing_s = computing_seconds(observed, step_s)
    own_s = computing_s * (1 - max(observed.stolen_share, observed.throttled_share))
    return max(0.0, own_s - sum(floors(observed, step_s)))


def slowed_share(observed: Observed) -> float:
    """The share of a later step's time by which it is longer than those at the beginning; 0 where they are alike.

    Of steps with unequally many tokens, the time of a token. Medians of thirds: single slow steps are others' work, a limit of
    heat or power holds all that follow, so hardly a late step is as short as an early one.
    """
    slots = observed.step_slots or (1.0,) * len(observed.step_s)
    each = [taken / max(1.0, count) for taken, count in zip(observed.step_s, slots, strict=True)]
    if len(each) < LEAST_STEPS_FOR_TREND:
        return 0.0
    third = len(each) // 3
    parts = [sorted(part) for part in (each[:third], each[third:-third], each[-third:])]
    early, middle, late = (statistics.median(part) for part in parts)
    apart = parts[2][third // 4] > parts[0][-1 - third // 4]
    return 1 - early / late if apart and early <= middle <= late and late >= SLOWED * early else 0.0


def _of_step(observed: Observed, step_s: float) -> dict[str, float]:
    """Cause -> seconds of a step."""
    computing_s = computing_seconds(observed, step_s)
    products_s, traffic_s = floors(observed, step_s)
    passes_s = sum(observed.parts.get(part, 0.0) for part in ("forward", "backward")) or computing_s
    slots = observed.real_tokens + observed.padding_tokens
    found = {DATA: observed.parts.get("data", 0.0) + observed.parts.get("copy", 0.0), COMPUTE: products_s,
             BANDWIDTH: traffic_s, OVERHEAD: overhead_seconds(observed, step_s), BUSY: computing_s * observed.stolen_share,
             # what others take makes steps longer too, and is not called throttling
             THROTTLING: computing_s * max(observed.throttled_share, 0.0 if observed.stolen_share else slowed_share(observed)),
             SPLIT: computing_s * (1 - 1 / observed.split_over)}
    if observed.flops:
        found[CAPACITY] = passes_s * observed.recompute_flops / observed.flops
    if slots:
        found[PADDING] = passes_s * observed.padding_tokens / slots
    if observed.threads is not None and observed.threads < observed.cores:
        found[THREADS] = computing_s * (1 - observed.threads / observed.cores)
    return found


def _said_of_step(observed: Observed, step_s: float) -> dict[str, str]:
    slots, slowed = observed.real_tokens + observed.padding_tokens, slowed_share(observed)
    recomputed = observed.recompute_flops / observed.flops if observed.flops else 0.0
    would = "would not hold the step without that" if observed.recomputing_is_needed else "would hold the step without that"
    return {
        DATA: f"of a step's {_seconds(step_s)} it waits {_seconds(observed.parts.get('data', 0.0))} for data and copies for "
              f"{_seconds(observed.parts.get('copy', 0.0))}",
        **_said_of_floors(observed, step_s),
        PADDING: f"{observed.padding_tokens:,.0f} of a step's {slots:,.0f} slots are padding",
        CAPACITY: f"{recomputed:.0%} of what is computed is computed a second time, and the memory {would}",
        THREADS: f"{observed.threads} of the {observed.cores} cores that this process may use compute",
        BUSY: f"other processes kept {observed.others_cores:.1f} of {observed.cores} cores busy, and took "
              f"{observed.stolen_share:.0%} of the computing threads' time",
        THROTTLING: f"{observed.throttled_by} held it for {observed.throttled_share:.0%} of the time"
                    if observed.throttled_share > slowed else
                    f"steps took {1 / (1 - slowed):.2f} times as long at the end as at the beginning, and nothing else ran",
        SPLIT: f"the model lies on {observed.split_over} devices, of which one computes at a time",
    }


def _said_of_floors(observed: Observed, step_s: float) -> dict[str, str]:
    if not is_counted(observed):
        unknown = "what this model computes is not counted here, so compute, traffic and overhead cannot be told apart"
        return {COMPUTE: unknown, BANDWIDTH: unknown, OVERHEAD: unknown}
    products_s, traffic_s = floors(observed, step_s)
    rest_s = overhead_seconds(observed, step_s)
    each = "" if observed.passes <= 1 else f", which takes {observed.passes:.3g} passes"
    peak = observed.peak_flops_per_s[observed.dtype]
    return {
        COMPUTE: f"a step's {(observed.flops or 0) / 1e9:,.3g} GFLOP take {_seconds(products_s)} of its {_seconds(step_s)} at "
                 f"the measured {observed.dtype} peak of {peak / 1e12:.3g} TFLOP/s",
        BANDWIDTH: f"{(observed.moved_bytes or 0) / 2**20:,.0f} MiB between products and by the optimizer take "
                   f"{_seconds(traffic_s)} of a step's {_seconds(step_s)} at the measured bandwidth",
        OVERHEAD: f"{_seconds(rest_s)} of a step's {_seconds(step_s)}{each}, are neither products at the measured peak nor "
                  "memory traffic",
    }


def _said_between(part: Between, step_s: float) -> str:
    return (f"it takes {_seconds(part.seconds)} every {part.every:,} steps of {_seconds(step_s)} each "
            f"({part.key}={part.every})")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
