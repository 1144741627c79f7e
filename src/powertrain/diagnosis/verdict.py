"""What holds a run back: the share of its time that each cause takes, and what curing it would give.

All shares are of the wall time that a step takes on average over the whole run, with its part of evaluations, checkpoints
and the like. Shares of different causes may overlap: padding is computed in products too. A cause that takes the share s
bounds what curing it can give: at most 1 / (1 - s) times as fast (Amdahl 1967). What its cure is *predicted* to give is
less: as measured, where the cure was tried in a probe, else by a formula on the measured parts, which is named.

Causes are ranked by what their cures are predicted to give. What cannot be cured comes last, the largest share first: of a
run that nothing holds back that is the wall which it stands at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from powertrain.diagnosis.observed import (
    BANDWIDTH,
    BUSY,
    CAPACITY,
    CHECKPOINTING,
    COMPUTE,
    DATA,
    EVALUATION,
    LOGGING,
    OVERHEAD,
    PADDING,
    RECOMPILATION,
    SPLIT,
    THREADS,
    THROTTLING,
    Between,
    Observed,
    Remedy,
)
from powertrain.diagnosis.shares import Shares, shares_of
from powertrain.records.findings import Cure, Evidence

__all__ = ["Between", "Cause", "Observed", "Remedy", "amdahl", "causes"]

WORTH_SHARE = 0.02           # of the wall time: a cause that takes less is nobody's bound
WORTH_GAIN = 1.02            # times as fast: a cure that is predicted to give less ranks with those that give nothing
AFFORDABLE = 0.02            # of the wall time: what evaluating, saving and logging may take, each
LARGEST_BOUND = 100.0        # a share of 1 bounds nothing; more than this says nothing more

# where no change of the recipe is known to help
NOTHING_TO_CHANGE: Mapping[str, str] = {
    DATA: "give it a faster source: preparing ahead cannot hide what takes longer than the steps",
    OVERHEAD: "nothing in the recipe is known to lower it at this batch; a larger train_batch_size would, and trains otherwise",
    COMPUTE: "nothing: the machine computes what the model needs; a smaller model or a faster machine would help",
    BANDWIDTH: "nothing in the recipe is known to move fewer bytes; a larger train_batch_size would share the optimizer's out",
    CAPACITY: "free some memory: what does not fit is computed twice",
    PADDING: "nothing is known against it for this model, which reads padded batches only",
    EVALUATION: "evaluate less often", CHECKPOINTING: "save less often", LOGGING: "log less often",
    RECOMPILATION: "keep the shapes of the batches equal",
    THREADS: "nothing in the recipe: this process may not use more cores",
    SPLIT: "show this process one device (CUDA_VISIBLE_DEVICES=0), and use the others for other runs",
    BUSY: "end the other processes that compute, or wait for them",
    THROTTLING: "lift the limit",
}


@dataclass(frozen=True)
class Cause:
    name: str                                # one of observed.BOUNDS
    share: float                             # of the wall time
    bound: float                             # without it the run is at most this many times as fast
    evidence: tuple[Evidence, ...]
    cure: Cure
    predicted: float                         # times as fast the cure is predicted to make the run; 1 where there is none
    basis: str = "none"                      # of the prediction


def causes(observed: Observed) -> list[Cause]:
    """Everything that takes a share worth naming; what is cured with the largest gain first. Never empty."""
    shares = shares_of(observed)
    most = max(shares.by_cause, key=lambda name: shares.by_cause[name])
    found = [_cause(name, observed, shares) for name, share in shares.by_cause.items()
             if share >= WORTH_SHARE or name == most]
    return sorted(found, key=lambda cause: (-cause.predicted if cause.predicted >= WORTH_GAIN else -1.0, -cause.share))


def amdahl(share: float) -> float:
    """At most this many times as fast without what takes `share` of the time."""
    return LARGEST_BOUND if share >= 1 - 1 / LARGEST_BOUND else 1 / (1 - max(0.0, share))


def predicted_speed(remedy: Remedy, share: float, shares: Shares) -> float:
    """Times as fast the whole run becomes with it: what is between the steps stays as it is."""
    if remedy.speed is not None:
        return shares.wall_s / (shares.wall_s - shares.step_s + shares.step_s / remedy.speed)
    return 1.0 if remedy.kept is None else amdahl(share * (1 - remedy.kept))


def promise_of(remedy: Remedy, observed: Observed) -> float:
    """Times as fast, at most, before it is tried: what arithmetic says, or where it says nothing the bound of the cause."""
    shares = shares_of(observed)
    share = shares.by_cause.get(remedy.against, 0.0)
    return amdahl(share) if remedy.kept is None else predicted_speed(remedy, share, shares)


def _cause(name: str, observed: Observed, shares: Shares) -> Cause:
    share = shares.by_cause[name]
    if name in observed.between:
        cure, predicted, basis = _less_often(observed.between[name], observed.steps, shares)
    elif (remedy := _best(name, share, observed.remedies, shares)) is not None:
        cure, predicted, basis = remedy.cure, predicted_speed(remedy, share, shares), remedy.basis
    else:
        cure, predicted, basis = _without_remedy(name, share, observed)
    return Cause(name, share, amdahl(share), shares.evidence[name], cure, max(1.0, predicted), basis)


def _best(name: str, share: float, remedies: Sequence[Remedy], shares: Shares) -> Remedy | None:
    """The one against this cause that promises most; those that were tried go before those that were not."""
    against = [remedy for remedy in remedies if remedy.against == name]
    return max(against, default=None, key=lambda one: (one.speed is not None, predicted_speed(one, share, shares)))


def _less_often(between: Between, steps: int, shares: Shares) -> tuple[Cure, float, str]:
    """The interval at which it takes what is affordable, or half a run where the run is too short for that."""
    others_s = shares.wall_s - between.per_step_s(steps)
    affordable = _round_number(between.seconds / (AFFORDABLE * others_s)) if others_s > 0 else steps
    every = max(between.every, min(affordable, max(1, steps // 2)))
    rarer = Between(between.key, between.seconds, every).per_step_s(steps)
    if every == between.every:               # it is not its interval: the run is short, or each time takes long
        return Cure(f"do less each time, or train longer: every {every:,} of {steps:,} steps is not too often"), 1.0, "none"
    return (Cure(f"do it every {every:,} steps instead of every {between.every:,}", words=(f"{between.key}={every}",)),
            shares.wall_s / (others_s + rarer),
            f"formula: {between.seconds:.3g} s each time, measured; then {rarer / (others_s + rarer):.1%} of the run")


def _round_number(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least so much."""
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, least))))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _without_remedy(name: str, share: float, observed: Observed) -> tuple[Cure, float, str]:
    """What can be said where no change of the recipe helps; time that others took comes back when they leave."""
    if name == BUSY:
        return Cure(NOTHING_TO_CHANGE[BUSY]), amdahl(share), "formula: the time that they took, measured"
    if name == THROTTLING:
        limit = observed.throttled_by or "heat or power of the machine"
        return Cure(f"{NOTHING_TO_CHANGE[THROTTLING]}: {limit}"), amdahl(share), "formula: the time lost to it, measured"
    return Cure(NOTHING_TO_CHANGE[name]), 1.0, "none"
