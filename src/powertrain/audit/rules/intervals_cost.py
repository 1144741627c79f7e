"""Evaluation or checkpoints so often that the run pays for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import at_most, evaluation_share, reckonable, tokens_per_step
from powertrain.audit.resolved import interval_steps, run_steps, seen
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Evidence, Expected, Finding, Severity

BUDGET = 0.02                # of the run's time, for what is not training
MUCH = 0.05                  # of it; less is within what equal runs differ by


class IntervalsCost(Rule):
    name = "intervals_cost"
    rests_on = "features: X11 (share = cost / (cost + interval x step))"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        steps = run_steps(subject, where)
        says: list[str] = []
        seen_: list[Evidence] = []
        expected, cure = UNMEASURED, Cure("Evaluate and save at intervals that cost at most 2 % of the run")
        evaluating, saving = interval_steps(subject, "eval", steps), interval_steps(subject, "save", steps)
        facts = reckonable(where)
        tokens = tokens_per_step(subject, facts) if facts else None
        share = evaluation_share(facts, tokens, evaluating) if facts and tokens and evaluating else None
        if share is not None and evaluating is not None and facts is not None and share > BUDGET:
            every = math.ceil(evaluating * share / (1 - share) * (1 - BUDGET) / BUDGET)
            says.append(f"reading {facts.data.validation_tokens:,} held-out tokens every {evaluating:g} steps is {share:.0%} "
                        f"of all products; every {every} steps it would be {BUDGET:.0%}")
            expected = at_most(share, "the products of evaluations")
            cure = Cure(f"Evaluate every {every} steps, or fewer examples", set_to(subject, "training.eval_steps", every),
                        (f"eval_steps={every}",))
        elif share is None and evaluating == 1:
            says.append("held-out data is read after every step")
        if says:
            seen_.append(seen(subject, "training.eval_steps"))
        if saving == 1:
            says.append("a checkpoint is written after every step")
            seen_.append(seen(subject, "training.save_steps"))
            if len(seen_) == 1:
                cure = Cure("Save as often as you would not mind to lose the work", (), ("save_steps=500",))
                expected = Expected("the seconds of a checkpoint, each step", "none")
        if says:
            text = "; ".join(says)
            severity: Severity = "low" if says and saving != 1 and share is not None and share < MUCH else "moderate"
            yield cls.found(severity, "intervals that the run pays for", text[0].upper() + text[1:], *seen_,
                            expected=expected, cure=cure)
