"""Claims are heard one experiment after the other, and what is found is kept as it comes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from powertrain.claims.claim import Catalogue, Claim, Experiment
from powertrain.claims.experiments import UNTIMED, Bench, Outcome, arms_of, carry_out, reading
from powertrain.claims.needs import why_not
from powertrain.claims.verdicts import by_bound, decide
from powertrain.evidence.arms import CannotRun
from powertrain.evidence.clock import Arena
from powertrain.evidence.stats import MARGIN, noise_floor
from powertrain.records import Hardware, Software, to_plain
from powertrain.records.evidence import INCONCLUSIVE, INVALID, NOT_HERE, Arm, ArmRun, Comparison, Interval, Parity

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """One claim's row of a study."""

    claim: Claim
    verdict: str
    because: str
    measured: Interval | None = None
    parity: Parity | None = None
    conditions: str = ""

    def to_json(self) -> dict[str, Any]:
        claim = self.claim
        span = None if claim.range is None else [end if math.isfinite(end) else None for end in claim.range]
        return {"id": claim.id, "document": claim.document, "what": claim.what, "claimed": claim.claimed, "range": span,
                "unit": claim.unit, "better": claim.better, "measured": to_plain(self.measured), "verdict": self.verdict,
                "because": self.because, "prior": claim.prior, "experiment": claim.experiment, "metric": claim.metric,
                "conditions": self.conditions, "parity": to_plain(self.parity)}


@dataclass
class Hearing:
    """What a run of claims has found so far."""

    catalogue: Catalogue
    arena: Arena
    bench: Bench
    say: Say
    keep: Callable[[Hearing], None]          # after each experiment: a study that is interrupted holds what it has
    findings: list[Finding] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    runs: list[ArmRun] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    noise_floor: float | None = None
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)        # experiments that there was no time for

    def hear(self, claims: Sequence[Claim], hardware: Hardware, software: Software) -> None:
        """Each claim gets a finding, as far as the time reaches."""
        here: list[Claim] = []
        for claim in claims:
            reason = why_not(claim.needs, hardware, software)
            if reason is None:
                here.append(claim)
            else:
                self.findings.append(Finding(claim, NOT_HERE, reason, conditions=conditions_of(self.catalogue, claim)))
        self.keep(self)
        for experiment, decided in by_experiment(self.catalogue, here):
            self._one(experiment, decided)
            self.keep(self)

    def _one(self, experiment: Experiment, claims: Sequence[Claim]) -> None:
        left_s = self.bench.deadline - time.monotonic()
        if experiment.seconds > max(left_s, 0.0):
            self.left.append(experiment.name)
            return
        if self.noise_floor is None and is_timed(experiment, claims):
            self._control(experiment)
        self.say(f"{', '.join(claim.id for claim in claims)}: {experiment.name}")
        outcome = carry_out(experiment, claims, replace(self.bench, margin=max(MARGIN, self.noise_floor or 0.0)))
        if outcome is None:
            self.left.append(experiment.name)
            return
        self._write(outcome)
        for claim in claims:
            found = judge(claim, outcome, self.noise_floor if is_timed(experiment, claims) else None)
            self.findings.append(replace(found, conditions=conditions_of(self.catalogue, claim)))
            self.say(f"{claim.id}: {found.verdict}; {found.because}")

    def _control(self, experiment: Experiment) -> None:
        """An arm against itself, once: what this machine cannot tell apart."""
        arm = arms_of(experiment)[0]
        self.say(f"an arm against itself, for the noise of this machine: {arm.name}")
        try:
            comparison, *runs = self.arena.control(arm, self.bench.pace, self.bench.deadline)
            self.noise_floor = noise_floor(comparison)
        except (CannotRun, ValueError) as error:
            self.say(f"no noise floor: {error}")
            return
        again = replace(arm, name=comparison.b)
        self._add((arm, again), tuple(runs), comparison)

    def _write(self, outcome: Outcome) -> None:
        self._add(outcome.arms, outcome.runs, outcome.comparison and replace(outcome.comparison, parity=outcome.parity))
        self.experiments[outcome.experiment.name] = {
            "kind": outcome.experiment.kind, "seconds": round(outcome.seconds, 1), "failed": outcome.failed,
            "allocated_bytes": outcome.allocated_bytes, "bound": to_plain(outcome.bound),
            "comparison": len(self.comparisons) - 1 if outcome.comparison else None, "parity": to_plain(outcome.parity),
            "measured": to_plain(outcome.measured), **outcome.detail}

    def _add(self, arms: Sequence[Arm], runs: Sequence[ArmRun], comparison: Comparison | None) -> None:
        known = {arm.name for arm in self.arms}
        self.arms += [replace(arm, plan=self.arena.plans.get(arm.name)) for arm in arms if arm.name not in known]
        self.runs += runs
        self.comparisons += [comparison] if comparison else []

    def to_json(self) -> dict[str, Any]:
        """The findings of a Study of kind `claims`."""
        return {"claims": [finding.to_json() for finding in sorted(self.findings, key=lambda item: item.claim.id)],
                "experiments": self.experiments}


def by_experiment(catalogue: Catalogue, claims: Sequence[Claim]) -> Iterator[tuple[Experiment, list[Claim]]]:
    """Each experiment once, the cheapest kind first: what needs no measuring, then in the order of the claims."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.experiment, []).append(claim)
    for name in sorted(groups, key=lambda name: catalogue.experiments[name].kind != "reasoned"):
        yield catalogue.experiments[name], groups[name]


def is_timed(experiment: Experiment, claims: Sequence[Claim]) -> bool:
    return experiment.kind == "arms" and bool({claim.metric or "speed" for claim in claims} - UNTIMED)


def conditions_of(catalogue: Catalogue, claim: Claim) -> str:
    experiment = catalogue.experiment_of(claim)
    words = f"powertrain train {' '.join(experiment.words)}" if experiment.kind == "arms" else ""
    return "; ".join(part for part in (claim.conditions, experiment.conditions, words) if part)


def judge(claim: Claim, outcome: Outcome, floor: float | None) -> Finding:
    """The verdict on one claim by its experiment."""
    experiment = outcome.experiment
    if outcome.failed is not None:
        return Finding(claim, INCONCLUSIVE, f"it could not be measured: {outcome.failed}")
    if experiment.verdict is not None:
        return Finding(claim, experiment.verdict, experiment.because)
    if outcome.bound is not None and outcome.comparison is None and not outcome.allocated_bytes:
        found = by_bound(claim, outcome.bound.times, " and ".join(outcome.bound.acts_on))
        assert found is not None, claim.id
        return Finding(claim, *found, parity=outcome.parity)
    if outcome.comparison is not None and outcome.comparison.verdict == INVALID:
        return Finding(claim, INCONCLUSIVE, f"a run had no speed: {outcome.comparison.because}", parity=outcome.parity)
    if outcome.parity is not None and not outcome.parity.holds:
        return Finding(claim, INCONCLUSIVE, f"the arms do not learn the same: {outcome.parity.because}", parity=outcome.parity)
    measured = reading(claim, outcome)
    if measured is None:
        return Finding(claim, INCONCLUSIVE, "the measurement gave no value", parity=outcome.parity)
    verdict, because = decide(claim, measured, noise_floor=floor)
    return Finding(claim, verdict, _with_reason(because, experiment, outcome), measured, outcome.parity)


def _with_reason(because: str, experiment: Experiment, outcome: Outcome) -> str:
    if experiment.kind == "reasoned":
        return f"{because}. By arithmetic: {experiment.because}"
    if outcome.bound is None or not math.isfinite(outcome.bound.times):
        return because
    return f"{because}; at most {outcome.bound.times:.2f} times by Amdahl"
