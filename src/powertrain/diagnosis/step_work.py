"""What one step of a plan computes and moves, for as many tokens as its steps really had."""

from __future__ import annotations

from typing import Any

from powertrain import planner
from powertrain.cost.estimate import workload_work
from powertrain.cost.roofline import MOVED_SHARE
from powertrain.records import Facts, Plan, UnknownFact


def step_work(facts: Facts, plan: Plan, real_tokens: float, padding_tokens: float) -> dict[str, Any]:
    """Fields of Observed; only tokens and dtype where the model's work is not counted."""
    workload = planner.workload_of(facts, plan)
    known: dict[str, Any] = {"real_tokens": real_tokens, "padding_tokens": padding_tokens, "dtype": workload.dtype}
    try:
        work = workload_work(facts.model, workload)
    except UnknownFact:
        return known
    needed = work.flops * real_tokens / work.tokens
    slots = (real_tokens + padding_tokens) / (work.tokens / (1 - workload.padding_share))    # over those that were expected
    padding, recomputed = needed * padding_tokens / real_tokens, work.recompute_flops * slots
    between = MOVED_SHARE.get(facts.hardware.device, 1.0) * work.elementwise_bytes * slots
    return {**known, "flops": needed + padding + recomputed, "padding_flops": padding, "recompute_flops": recomputed,
            "moved_bytes": between + work.optimizer_bytes}
