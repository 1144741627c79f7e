"""A session of claims: their experiments one after the other, each result stored as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from powertrain.claims.claim import Catalogue, Claim, Experiment
from powertrain.claims.experiments import UNTIMED, Bench, Outcome, arms_of, carry_out
from powertrain.claims.needs import why_not
from powertrain.claims.verdicts import ClaimRow, judge
from powertrain.evidence.arms import CannotRun
from powertrain.evidence.clock import Arena
from powertrain.evidence.stats import MARGIN, noise_floor
from powertrain.records import Hardware, Software, to_plain
from powertrain.records.evidence import NOT_HERE, Arm, ArmRun, Comparison

Say = Callable[[str], None]


@dataclass
class ClaimSession:
    """The results of `powertrain claims run` so far."""

    catalogue: Catalogue
    arena: Arena
    bench: Bench
    say: Say
    keep: Callable[[ClaimSession], None]          # called after each experiment, so that an interrupted study has all results
    rows: list[ClaimRow] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    runs: list[ArmRun] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    noise_floor: float | None = None
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)        # experiments for which there was no time

    def decide(self, claims: Sequence[Claim], hardware: Hardware, software: Software) -> None:
        """Give each claim a verdict, until the time is up."""
        here: list[Claim] = []
        for claim in claims:
            reason = why_not(claim.needs, hardware, software)
            if reason is None:
                here.append(claim)
            else:
                self.rows.append(ClaimRow(claim, NOT_HERE, reason, conditions=conditions_of(self.catalogue, claim)))
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
            self.rows.append(replace(found, conditions=conditions_of(self.catalogue, claim)))
            self.say(f"{claim.id}: {found.verdict}; {found.because}")

    def _control(self, experiment: Experiment) -> None:
        """Measure an arm against itself, once, for the noise floor of this machine."""
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
        """Return the findings of a study of kind `claims`."""
        return {"claims": [row.to_json() for row in sorted(self.rows, key=lambda item: item.claim.id)],
                "experiments": self.experiments}


def by_experiment(catalogue: Catalogue, claims: Sequence[Claim]) -> Iterator[tuple[Experiment, list[Claim]]]:
    """Yield each experiment with its claims: first those that measure nothing, then in the order of the claims."""
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
