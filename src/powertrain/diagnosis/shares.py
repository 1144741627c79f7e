"""The shares of a run's wall time that each possible bound takes, with the evidence for each.

A step's matrix products take at least their FLOPs at the measured peak; the operators between them take at least their bytes
at the measured bandwidth. The rest of the computing time is overhead: starting operators, and products too small for the
peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from powertrain import planner
from powertrain.cost.estimate import workload_work
from powertrain.cost.roofline import MOVED_SHARE
from powertrain.diagnosis.observed import Between, Bound, Observed
from powertrain.diagnosis.wording import seconds
from powertrain.records import Facts, Plan, UnknownFact
from powertrain.records.findings import Evidence

SLOWED = 1.15                # times as long as at the beginning: steps that take this much longer later were slowed down
LEAST_STEPS_FOR_TREND = 12   # four in each third


@dataclass(frozen=True)
class Shares:
    wall_s: float                            # of a step on average, with its part of the work between steps
    step_s: float                            # of a step alone
    by_cause: Mapping[Bound, float]          # share (0..1) of wall_s
    evidence: Mapping[Bound, tuple[Evidence, ...]]


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


def shares_of(observed: Observed) -> Shares:
    step_s, steps = statistics.mean(observed.step_s), observed.steps
    between = observed.between
    taken_s = _of_step(observed, step_s) | {name: part.per_step_s(steps) for name, part in between.items()}
    evidence = _step_evidence(observed, step_s) | {name: _pause_evidence(part, step_s) for name, part in between.items()}
    recompile_s = observed.recompile_s / max(1, steps)
    if observed.recompilations:
        taken_s[Bound.RECOMPILATION] = recompile_s
        evidence[Bound.RECOMPILATION] = (f"{observed.recompilations} recompilations while the steps were watched; about "
                                         f"{seconds(observed.recompile_s)} of the run")
    wall_s = step_s + recompile_s + sum(part.per_step_s(steps) for part in between.values())
    return Shares(wall_s, step_s, {name: min(1.0, part_s / wall_s) for name, part_s in taken_s.items()},
                  {name: (Evidence(text),) for name, text in evidence.items()})


def floors(observed: Observed, step_s: float) -> tuple[float, float]:
    """Return the seconds of a step that its products and its memory traffic explain, at most its computing time."""
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
    """Return whether both the FLOPs of the model and the peak of this machine are known."""
    return observed.flops is not None and observed.dtype in observed.peak_flops_per_s


def computing_seconds(observed: Observed, step_s: float) -> float:
    """Return the seconds of a step that neither wait for data nor copy it."""
    return max(0.0, step_s - observed.parts.get("data", 0.0) - observed.parts.get("copy", 0.0))


def overhead_seconds(observed: Observed, step_s: float) -> float:
    """Return the computing seconds of a step that neither products, memory traffic nor other processes explain."""
    computing_s = computing_seconds(observed, step_s)
    own_s = computing_s * (1 - max(observed.stolen_share, observed.throttled_share))
    return max(0.0, own_s - sum(floors(observed, step_s)))


def slowed_share(observed: Observed) -> float:
    """Return the share by which late steps take longer than early ones; 0 where they take the same time.

    Steps with different numbers of tokens are compared by the time of a token. Medians of thirds are compared: single slow
    steps are the work of other processes, but a limit of heat or power slows all steps that follow.
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


def _of_step(observed: Observed, step_s: float) -> dict[Bound, float]:
    """Return the seconds of a step that each bound takes."""
    computing_s = computing_seconds(observed, step_s)
    products_s, traffic_s = floors(observed, step_s)
    passes_s = sum(observed.parts.get(part, 0.0) for part in ("forward", "backward")) or computing_s
    slots = observed.real_tokens + observed.padding_tokens
    # steps that other processes lengthen are not called throttled
    throttled = max(observed.throttled_share, 0.0 if observed.stolen_share else slowed_share(observed))
    found = {Bound.DATA: observed.parts.get("data", 0.0) + observed.parts.get("copy", 0.0), Bound.COMPUTE: products_s,
             Bound.BANDWIDTH: traffic_s, Bound.OVERHEAD: overhead_seconds(observed, step_s),
             Bound.BUSY: computing_s * observed.stolen_share, Bound.THROTTLING: computing_s * throttled,
             Bound.SPLIT: computing_s * (1 - 1 / observed.split_over)}
    if observed.flops:
        found[Bound.CAPACITY] = passes_s * observed.recompute_flops / observed.flops
    if slots:
        found[Bound.PADDING] = passes_s * observed.padding_tokens / slots
    if observed.threads is not None and observed.threads < observed.cores:
        found[Bound.THREADS] = computing_s * (1 - observed.threads / observed.cores)
    return found


def _step_evidence(observed: Observed, step_s: float) -> dict[Bound, str]:
    slots, slowed = observed.real_tokens + observed.padding_tokens, slowed_share(observed)
    recomputed = observed.recompute_flops / observed.flops if observed.flops else 0.0
    fits = "does not fit" if observed.recomputing_is_needed else "fits"
    throttled = f"{observed.throttled_by} held it for {observed.throttled_share:.0%} of the time" \
        if observed.throttled_share > slowed else \
        f"steps took {1 / (1 - slowed):.2f} times as long at the end as at the beginning, and no other process ran"
    return {
        Bound.DATA: f"of a step's {seconds(step_s)}, {seconds(observed.parts.get('data', 0.0))} wait for data and "
                    f"{seconds(observed.parts.get('copy', 0.0))} copy it",
        **_computing_evidence(observed, step_s),
        Bound.PADDING: f"{observed.padding_tokens:,.0f} of a step's {slots:,.0f} slots are padding",
        Bound.CAPACITY: f"{recomputed:.0%} of the FLOPs are recomputed, and without recomputing the step {fits} the memory",
        Bound.THREADS: f"{observed.threads} threads compute, and this process may use {observed.cores} cores",
        Bound.BUSY: f"other processes kept {observed.others_cores:.1f} of {observed.cores} cores busy, and took "
                    f"{observed.stolen_share:.0%} of the computing threads' time",
        Bound.THROTTLING: throttled,
        Bound.SPLIT: f"the model lies on {observed.split_over} devices, and one of them computes at a time",
    }


def _computing_evidence(observed: Observed, step_s: float) -> dict[Bound, str]:
    if not is_counted(observed):
        return dict.fromkeys((Bound.COMPUTE, Bound.BANDWIDTH, Bound.OVERHEAD), "the FLOPs of this model are not counted, so "
                             "compute, memory traffic and overhead cannot be separated")
    products_s, traffic_s = floors(observed, step_s)
    rest_s = overhead_seconds(observed, step_s)
    passes = "" if observed.passes <= 1 else f" in {observed.passes:.3g} passes"
    peak = observed.peak_flops_per_s[observed.dtype]
    return {
        Bound.COMPUTE: f"a step's {(observed.flops or 0) / 1e9:,.3g} GFLOP take {seconds(products_s)} of its "
                       f"{seconds(step_s)} at the measured {observed.dtype} peak of {peak / 1e12:.3g} TFLOP/s",
        Bound.BANDWIDTH: f"{(observed.moved_bytes or 0) / 2**20:,.0f} MiB between products and by the optimizer take "
                         f"{seconds(traffic_s)} of a step's {seconds(step_s)} at the measured bandwidth",
        Bound.OVERHEAD: f"{seconds(rest_s)} of a step's {seconds(step_s)}{passes} are neither products at the measured "
                        "peak nor memory traffic",
    }


def _pause_evidence(part: Between, step_s: float) -> str:
    return f"{seconds(part.seconds)} every {part.every:,} steps of {seconds(step_s)} ({part.key}={part.every})"
