"""A session of claims: their experiments one after the other, stored as a study of kind `claims` after each of them.

The same studies are read for the verdicts on this machine.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from powertrain.claims.claim import Catalogue, Claim, Experiment, why_not
from powertrain.claims.experiments import UNTIMED, Outcome, arms_of, carry_out
from powertrain.claims.probes import Context
from powertrain.claims.verdicts import ClaimRow, judge
from powertrain.evidence import studies
from powertrain.evidence.clock import CannotRun
from powertrain.evidence.stats import MARGIN, noise_floor
from powertrain.records import Hardware, Software, to_plain
from powertrain.records.evidence import NOT_HERE, Arm, ArmRun, Comparison, Study
from powertrain.records.json_files import read_json

WHAT = "claims"


@dataclass
class ClaimSession:
    """The results of `powertrain claims run` so far."""

    catalogue: Catalogue
    bench: Context
    say: Callable[[str], None]
    keep: "Callable[[ClaimSession], None]"        # called after each experiment, so that an interrupted study has all results
    rows: list[ClaimRow] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    runs: list[ArmRun] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    noise_floor: float | None = None
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)        # experiments for which there was no time

    def decide(self, claims: Sequence[Claim], hardware: Hardware, software: Software) -> None:
        """Give each claim a verdict, until the time is up."""
        reasons = {claim.id: why_not(claim.needs, hardware, software) for claim in claims}
        for claim in claims:
            if (reason := reasons[claim.id]) is not None:
                self.rows.append(ClaimRow(claim, NOT_HERE, reason, conditions=self.catalogue.conditions_of(claim)))
        self.keep(self)
        for experiment, decided in by_experiment(self.catalogue, [claim for claim in claims if reasons[claim.id] is None]):
            if not self._one(experiment, decided):
                self.left.append(experiment.name)
            self.keep(self)

    def _one(self, experiment: Experiment, claims: Sequence[Claim]) -> bool:
        """Carry out an experiment and judge its claims. Return whether there was time."""
        if experiment.seconds > max(self.bench.deadline - time.monotonic(), 0.0):
            return False
        is_timed = experiment.kind == "arms" and bool({claim.metric or "speed" for claim in claims} - UNTIMED)
        if self.noise_floor is None and is_timed:
            self._control(experiment)
        self.say(f"{', '.join(claim.id for claim in claims)}: {experiment.name}")
        outcome = carry_out(experiment, claims, replace(self.bench, margin=max(MARGIN, self.noise_floor or 0.0)))
        if outcome is None:
            return False
        self._write(outcome)
        for claim in claims:
            found = judge(claim, outcome, self.noise_floor if is_timed else None)
            self.rows.append(replace(found, conditions=self.catalogue.conditions_of(claim)))
            self.say(f"{claim.id}: {found.verdict}; {found.because}")
        return True

    def _control(self, experiment: Experiment) -> None:
        """Measure an arm against itself, once, for the noise floor of this machine."""
        arm = arms_of(experiment)[0]
        self.say(f"an arm against itself, for the noise of this machine: {arm.name}")
        try:
            comparison, *runs = self.bench.arena.control(arm, self.bench.pace, self.bench.deadline)
            self.noise_floor = noise_floor(comparison)
        except (CannotRun, ValueError) as error:
            self.say(f"no noise floor: {error}")
            return
        self._add((arm, replace(arm, name=comparison.b)), runs, comparison)

    def _write(self, outcome: Outcome) -> None:
        self._add(outcome.arms, outcome.runs, outcome.comparison and replace(outcome.comparison, parity=outcome.parity))
        self.experiments[outcome.experiment.name] = {
            "kind": outcome.experiment.kind, "seconds": round(outcome.seconds, 1), "failed": outcome.failed,
            "allocated_bytes": outcome.allocated_bytes, "bound": to_plain(outcome.bound),
            "comparison": len(self.comparisons) - 1 if outcome.comparison else None, "parity": to_plain(outcome.parity),
            "measured": to_plain(outcome.measured), **outcome.detail}

    def _add(self, arms: Sequence[Arm], runs: Sequence[ArmRun], comparison: Comparison | None) -> None:
        known = {arm.name for arm in self.arms}
        self.arms += [replace(arm, plan=self.bench.arena.plans.get(arm.name)) for arm in arms if arm.name not in known]
        self.runs += runs
        self.comparisons += [comparison] if comparison else []

    def rows_as_json(self) -> list[dict[str, Any]]:
        return [row.to_json() for row in sorted(self.rows, key=lambda row: row.claim.id)]

    def study(self, name: str, circumstances: Mapping[str, Any], seconds: float) -> Study:
        """Return the study of the results so far."""
        return Study(name, WHAT, f"{len(self.rows)} of the documents' claims, measured or reasoned about on this machine",
                     **circumstances, arms=tuple(self.arms), runs=tuple(self.runs), comparisons=tuple(self.comparisons),
                     noise_floor=self.noise_floor, seconds=round(seconds, 1),
                     findings={"claims": self.rows_as_json(), "experiments": self.experiments})


def by_experiment(catalogue: Catalogue, claims: Sequence[Claim]) -> Iterator[tuple[Experiment, list[Claim]]]:
    """Yield each experiment with its claims: first those that measure nothing, then in the order of the claims."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.experiment, []).append(claim)
    for name in sorted(groups, key=lambda name: catalogue.experiments[name].kind != "reasoned"):
        yield catalogue.experiments[name], groups[name]


# ------------------------------------------------------------------------------------------------ stored studies


def known_verdicts(folder: Path, fingerprint: str) -> dict[str, Mapping[str, Any]]:
    """Return claim id -> its newest finding on the machine of this fingerprint, with its study's name as `study`.

    The studies are those of `folder`. Findings of the oldest study come first.
    """
    here = [study for study in _claim_studies(folder) if study.machine.get("fingerprint") == fingerprint]
    found: dict[str, Mapping[str, Any]] = {}
    for study in sorted(here, key=lambda study: (study.date, len(study.name), study.name)):
        for row in study.findings["claims"]:
            found.pop(row["id"], None)       # the newer finding takes its place at the end
            found[row["id"]] = {**row, "study": study.name}
    return found


def in_turn(ids: Sequence[str], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the ids without a verdict here; where all have one, all ids, those of the oldest study first."""
    return [name for name in ids if name not in found] or [name for name in found if name in ids]


def _claim_studies(folder: Path) -> Iterator[Study]:
    for path in sorted(folder.glob(f"*/{studies.EVIDENCE}")):
        if read_json(path, f"repair it, or move {path.parent} out of {folder}/").get("kind") == WHAT:
            yield studies.load(path.parent)
