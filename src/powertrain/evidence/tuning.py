"""Tuning: the fastest plan at the same training semantics, found by measuring.

Each candidate is the untuned plan with one technique changed. Short paired runs against the untuned plan keep the better
half of them, with twice the pairs each time (successive halving: Jamieson and Talwalkar 2016); what is left is combined
greedily, each combination measured too. Choosing the best of many noisy numbers finds luck as well as speed, so the plan
that comes out is compared with the untuned one once more, on fresh windows, and is kept only if it is faster there.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain import planner
from powertrain.evidence.clock import LEAST_PAIRS
from powertrain.evidence.notebook import Notebook, key_of, why_no_room
from powertrain.evidence.profile import Profile, bound
from powertrain.evidence.stats import MARGIN
from powertrain.planner import Tuned
from powertrain.records import Facts, Plan, RunFailed, WrongUse, to_plain
from powertrain.records.evidence import FASTER, Arm, Comparison, Interval
from powertrain.run.prepare import Prepared

FINALISTS = 4                # at which halving ends and combining begins
OF_ONE_TECHNIQUE = 2         # settings of one technique that go on to the next round
FINAL_PAIRS = 12             # of the comparison that decides, at least, if there is time
CONTROL, HALVING, COMBINING = 0.1, 0.65, 0.8         # of the budget: when each part has to end; the rest decides
COMPILES_S = 2.0             # a plan that takes so much longer to start has to earn that back
WORTH_IT = 2                 # times what it costs, for it to be used
LATER = "not reached within the budget"


@dataclass
class Candidate:
    """The untuned plan with one technique changed, and the results so far."""

    name: str                                # "without packing", "threads (threads=1)"
    technique: str
    pins: Mapping[str, Any]
    plan: Plan
    rounds: list[Interval] = field(default_factory=list)         # speed over the untuned plan
    kept: bool = False
    why: str = ""
    reached: bool = True                     # within the budget
    compile_s: float = 0.0                   # that it takes longer to start than the plan it was compared with
    even_steps: int | None = None            # after which that is earned back

    @property
    def speed(self) -> float:
        return self.rounds[-1].median if self.rounds else 0.0

    def is_slow_to_start(self) -> bool:
        return self.compile_s >= COMPILES_S

    def take_start_from(self, comparison: Comparison) -> None:
        self.compile_s, self.even_steps = comparison.compile_s, comparison.break_even_steps


@dataclass(frozen=True)
class Tuning:
    """The result of tuning. `pins` is empty where the untuned plan stays."""

    pins: Mapping[str, Any]
    plan: Plan                               # with them
    least_steps: Mapping[str, int]
    speed: Interval | None                   # of the comparison that decided; None where nothing came so far
    complete: bool                           # every candidate was reached
    because: str
    findings: Mapping[str, Any]

    def as_tuned(self, date: str, study: str) -> Tuned:
        assert self.speed is not None
        return Tuned(self.pins, self.speed, date, study, self.least_steps)


def untuned_plan(prepared: Prepared) -> Plan:
    """Return the plan without tuning, under the recipe's pins."""
    return planner.make_plan(prepared.facts, prepared.recipe, prepared.total_steps)


def candidates_of(prepared: Prepared, untuned: Plan) -> list[Candidate]:
    """Return every change of one technique that keeps the training: the first of each technique, then the second ones, ..."""
    recipe, facts = prepared.recipe, prepared.facts
    in_force = {step.technique.name: step.technique for step in untuned.steps}
    by_technique: list[list[Candidate]] = []
    seen = {key_of(untuned)}
    for name, technique in planner.BY_NAME.items():
        if name in recipe.techniques or technique.exactness.name == "LOSSY" or not technique.touches:
            continue
        found = []
        for variant in planner.variants_of(name, facts, recipe):
            if variant == in_force.get(name):
                continue
            pins = {name: "off" if variant is None else to_plain(variant)}
            plan = _plan_with(pins, prepared)
            if plan is not None and key_of(plan) not in seen:
                seen.add(key_of(plan))
                found.append(Candidate(_name(name, variant, in_force.get(name)), name, pins, plan))
        by_technique.append(found)
    return [candidate for turn in itertools.zip_longest(*by_technique) for candidate in turn if candidate is not None]


def _plan_with(pins: Mapping[str, Any], prepared: Prepared) -> Plan | None:
    try:
        return planner.make_plan(prepared.facts, planner.with_pins(prepared.recipe, pins), prepared.total_steps)
    except WrongUse:                         # these facts, or another pin, exclude it
        return None


def _name(name: str, variant: Any, now: Any) -> str:
    """Return the change in words, with the settings that differ from the present ones."""
    if variant is None:
        return f"without {name}"
    before = {} if now is None else to_plain(now)
    changed = ", ".join(f"{key}={value}" for key, value in to_plain(variant).items() if before.get(key) != value)
    return f"{name} ({changed})" if changed else f"with {name}"


def tune(prepared: Prepared, notebook: Notebook) -> Tuning:
    """Run control, halving, combining and the deciding comparison. Raises RunFailed if the untuned plan cannot run."""
    untuned = untuned_plan(prepared)
    arm, budget_s = notebook.arm(untuned, "untuned plan"), notebook.left_s()
    if (error := notebook.probe(arm).error) is not None:
        raise RunFailed(error)
    profile = next(iter(notebook.profile("a step of the untuned plan", arm)), None)
    control = notebook.noise("the untuned plan", arm, CONTROL * budget_s)
    candidates = candidates_of(prepared, untuned)
    notebook.say(f"{len(candidates)} plans with one technique changed: {', '.join(one.name for one in candidates)}")
    worth = [one for one in candidates if _can_matter(one, profile, prepared.facts, notebook)]
    finalists = _halve(worth, arm, notebook, (1 - HALVING) * budget_s)
    taken, combined = _combine(finalists, prepared, untuned, notebook, (1 - COMBINING) * budget_s)
    total, why_not = _decide(untuned, combined, prepared, notebook) if taken else (None, "")
    if not taken or why_not:
        tried = sum(bool(one.rounds) for one in candidates)
        because = f"the plan is already the fastest of {tried + 1} tried" + (f": {why_not}" if why_not else "")
        taken, combined = [], untuned
    else:
        because = notebook.comparisons[total or 0].because
    for candidate in taken:
        candidate.kept = True
    return Tuning(
        pins=_pins_of(taken), plan=combined, because=because,
        least_steps={one.technique: WORTH_IT * (one.even_steps or 0) for one in taken if one.is_slow_to_start()},
        speed=None if total is None else notebook.comparisons[total].speed,
        complete=all(one.reached for one in candidates),
        findings={"recipe": list(notebook.words), "chosen": _pins_of(taken), "total": total, "control": control,
                  "candidates": [_row(one) for one in candidates]})


# ------------------------------------------------------------------------------------------------ before the search


def _can_matter(candidate: Candidate, profile: Profile | None, facts: Facts, notebook: Notebook) -> bool:
    """Return whether the candidate fits the memory, and acts on enough of a step to gain more than the margin."""
    if (why := why_no_room(candidate.plan, facts)) is not None:
        candidate.why = why
    elif profile is not None:
        limit = bound(profile, profile, planner.BY_NAME[candidate.technique].acts_on)
        if limit < 1 + MARGIN:
            candidate.why = f"at most {limit:.3f} times as fast by its share of a step: within the margin, so not tried"
    if candidate.why:
        notebook.say(f"{candidate.name}: {candidate.why}")
    return not candidate.why


# ------------------------------------------------------------------------------------------------ the search


def _halve(candidates: Sequence[Candidate], untuned: Arm, notebook: Notebook, leave_s: float) -> list[Candidate]:
    """Return the finalists after rounds of more and more pairs, the fastest first. `leave_s` is kept for the later stages."""
    alive = list(candidates)
    rounds = 1 + max(0, math.ceil(math.log2(max(1, len(alive)) / FINALISTS)))
    for number in range(rounds):
        available_s = notebook.left_s() - leave_s
        later_s = leave_s + available_s * (rounds - number - 1) / (rounds - number)
        notebook.say(f"round {number + 1} of {rounds}: {len(alive)} plans against the untuned one")
        for index, candidate in enumerate(alive):
            share_s = (notebook.left_s() - later_s) / (len(alive) - index)
            if not notebook.reaches(later_s):
                candidate.reached, candidate.why = bool(candidate.why), candidate.why or LATER
            else:
                _try(candidate, untuned, notebook, share_s, pairs=LEAST_PAIRS * 2**number)
        alive = _better_half([candidate for candidate in alive if len(candidate.rounds) == number + 1], number + 1)
    return alive


def _try(candidate: Candidate, untuned: Arm, notebook: Notebook, share_s: float, pairs: int) -> None:
    index, why = notebook.attempt(candidate.name, untuned, notebook.arm(candidate.plan, candidate.name), share_s, pairs=pairs,
                                  anew=True)
    if index is None:
        candidate.why = f"it does not run: {why}"
        return
    found = notebook.comparisons[index]
    if found.speed is None:
        candidate.why = found.because
        return
    candidate.rounds.append(found.speed)
    candidate.take_start_from(found)


def _better_half(tried: Sequence[Candidate], number: int) -> list[Candidate]:
    """Return the faster half, fastest first, with few settings of one technique and without surely slower ones."""
    ranked = sorted(tried, key=lambda one: -one.speed)
    kept: list[Candidate] = []
    for candidate in ranked:
        low, high = candidate.rounds[-1].low, candidate.rounds[-1].high
        shown = f"{candidate.speed:.3f} times as fast ({low:.3f} to {high:.3f}) in round {number}"
        rivals = sum(one.technique == candidate.technique for one in kept)
        if high < 1:
            candidate.why = f"slower: {shown}"
        elif rivals == OF_ONE_TECHNIQUE:
            candidate.why = f"{shown}: other settings of {candidate.technique} are faster"
        elif len(kept) >= max(1, math.ceil(len(tried) / 2)):
            candidate.why = f"{shown}: not in the faster half"
        else:
            kept.append(candidate)
    return kept


def _combine(finalists: Sequence[Candidate], prepared: Prepared, untuned: Plan, notebook: Notebook, leave_s: float
             ) -> tuple[list[Candidate], Plan]:
    """Return the fastest finalist and each further one that surely makes the combination faster; empty if none is faster."""
    taken: list[Candidate] = []
    best = untuned
    for candidate in finalists:
        speed = candidate.rounds[-1]
        if speed.low <= 1:
            candidate.why = f"not surely faster: {speed.median:.3f} times as fast ({speed.low:.3f} to {speed.high:.3f})"
        elif candidate.is_slow_to_start() and candidate.even_steps is None:
            candidate.why = f"it takes {candidate.compile_s:.0f} s longer to start, and its gain is too small to earn that back"
        elif not taken:
            taken, best = [candidate], candidate.plan
        elif any(one.technique == candidate.technique for one in taken):
            candidate.why = f"another setting of {candidate.technique} is faster"
        elif (both := _plan_with(_pins_of([*taken, candidate]), prepared)) is None:
            candidate.why = f"it cannot be combined with {' and '.join(one.name for one in taken)}"
        elif not notebook.reaches(leave_s):
            candidate.reached, candidate.why = False, LATER
        else:
            name = " and ".join(one.name for one in [*taken, candidate])
            if _is_faster_with(candidate, notebook.arm(best), notebook.arm(both, name), notebook, leave_s):
                taken, best = [*taken, candidate], both
    return taken, best


def _is_faster_with(candidate: Candidate, best: Arm, both: Arm, notebook: Notebook, leave_s: float) -> bool:
    """Return whether the candidate's change surely makes the present plan faster."""
    if both == best:
        candidate.why = "it changes nothing beside the faster changes"
        return False
    notebook.say(f"{both.name}, together")
    index, why = notebook.attempt(both.name, best, both, (notebook.left_s() - leave_s) / 2)
    if index is None:
        candidate.why = f"combined with the faster changes it does not run: {why}"
        return False
    found = notebook.comparisons[index]
    earned_back = found.compile_s < COMPILES_S or found.break_even_steps is not None
    if found.speed is not None and found.speed.low > 1 and earned_back:
        candidate.take_start_from(found)
        return True
    candidate.why = f"combined with the faster changes: {found.because}"
    return False


def _decide(untuned: Plan, combined: Plan, prepared: Prepared, notebook: Notebook) -> tuple[int | None, str]:
    """Return the comparison of the combined plan with the untuned one on fresh windows, and why it is not used."""
    changed = [technique for plan, other in ((untuned, combined), (combined, untuned))
               for technique in (step.technique for step in plan.steps) if technique not in
               [step.technique for step in other.steps]]
    exactness = "BITWISE" if all(technique.exactness.name == "BITWISE" for technique in changed) else "ROUNDING"
    notebook.say("the faster plan against the untuned one: comparing their losses")
    parity, why = notebook.parity(exactness, [(untuned, combined)], prepared.facts, prepared.recipe.seed)
    if parity is None:
        return None, f"the losses of the faster plan could not be compared ({why})"
    if not parity.holds:
        return None, f"the faster plan does not learn the same ({parity.because})"
    notebook.say("the faster plan against the untuned one: the deciding comparison")
    index, why = notebook.attempt("the faster plan", notebook.arm(untuned), notebook.arm(combined), max(0.0, notebook.left_s()),
                                  pairs=FINAL_PAIRS, anew=True)
    if index is None:
        return None, f"the faster plan did not run once more ({why})"
    found = notebook.comparisons[index] = dataclasses.replace(notebook.comparisons[index], parity=parity)
    return index, "" if found.verdict == FASTER else f"on fresh windows the best of them was {found.because}"


def _pins_of(taken: Sequence[Candidate]) -> dict[str, Any]:
    return {name: pin for one in taken for name, pin in one.pins.items()}


def _row(candidate: Candidate) -> dict[str, Any]:
    return {"name": candidate.name, "pins": dict(candidate.pins), "rounds": to_plain(candidate.rounds),
            "kept": candidate.kept, "why": candidate.why, "reached": candidate.reached, "compile_s": candidate.compile_s,
            "break_even_steps": candidate.even_steps}
