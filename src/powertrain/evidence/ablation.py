"""Ablation: the effect of each technique of a plan on speed, memory and losses, measured on this machine.

Its verdict is that of leaving it out: the full plan against the strictly same plan without it. The ladder shows how the
techniques add up, from none to all of them, in the order of the catalogue. Before any of that a profile says what a
technique can change at most, and what cannot matter is not timed.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain import planner
from powertrain.evidence.notebook import Notebook, why_no_room
from powertrain.evidence.profile import Profile, bound
from powertrain.evidence.stats import TOO_NOISY
from powertrain.records import Effect, Facts, Plan, Proposal, Refusal, RunFailed, WrongUse, to_plain
from powertrain.records.evidence import INCONCLUSIVE, INVALID, NO_EFFECT, NOT_HERE, Arm, Interval, Parity
from powertrain.run.prepare import Prepared

LEFT_OUT, TOTAL, RUNG = 2.0, 1.0, 1.0        # weights of comparisons when they share the time: leaving out decides
MORE_PAIRS = 36              # of windows, at least, when what is undecided is measured again
PAIR_S = 2.0                 # two windows
FOR_TIMING = 0.5             # of the budget: memory and losses are looked at while more than that is left
LATER = "not reached within the budget; use a larger --budget, or --technique with this technique alone"


@dataclass
class Subject:
    """A technique, the two plans that differ by it, and the results so far."""

    step: Proposal
    with_it: Plan
    without: Plan
    forced: bool = False                     # the plan leaves it off, and it was asked for
    remarks: list[str] = field(default_factory=list)
    bound: float | None = None               # None: unknown or without limit
    ladder: int | None = None
    left_out: int | None = None
    memory_bytes: int | None = None
    parity: Parity | None = None
    verdict: str = INCONCLUSIVE
    why: str = ""

    @property
    def name(self) -> str:
        return self.step.technique.name

    @property
    def without_name(self) -> str:
        return "without " + " and ".join(name for name in self.with_it.names if name not in self.without.names)

    def arms(self, notebook: Notebook) -> tuple[Arm, Arm]:
        """Return the arms without the technique and with it."""
        return notebook.arm(self.without, self.without_name), notebook.arm(self.with_it, f"with {self.name}")

    @property
    def is_of_the_method(self) -> bool:
        """Return whether the technique is part of the requested method, so that leaving it out would train another model."""
        return not self.step.technique.touches


def subjects_of(prepared: Prepared, names: Sequence[str] = ()) -> list[Subject]:
    """Return the techniques to measure: those in force, or the named ones. Raises WrongUse for impossible ones."""
    planner.check_names(names)
    plan = prepared.plan
    by_name = {step.technique.name: step for step in plan.steps}
    found = [Subject(step, plan, plan.without(step.technique.name)) for step in plan.steps
             if not names or step.technique.name in names]
    found += [_forced(prepared, name) for name in dict.fromkeys(names) if name not in by_name]
    if not [subject for subject in found if not subject.is_of_the_method]:
        raise WrongUse("the plan has no technique that could be left out; remove pins, or name a technique with --technique")
    return found


def _forced(prepared: Prepared, name: str) -> Subject:
    """Return a technique that the plan leaves off, inserted at its place in the plan."""
    answer = planner.ask_anew(name, prepared.facts, prepared.recipe)
    if isinstance(answer, Refusal):
        if answer.possible is None:
            raise WrongUse(f"{name} cannot be measured here: {answer.because}")
        answer = Proposal(answer.possible, f"the plan leaves it off: {answer.because}",
                          Effect((0.5, 2.0), 0, basis="guess: the planner expects no gain", guessed=True))
    plan, slots = prepared.plan, answer.technique.slots
    rivals = [step.technique.name for step in plan.steps if step.technique.slots & slots]
    remarks = [f"it takes the place of {rivals[0]}"] if rivals else []
    return Subject(answer, planner.with_steps(plan, [answer]), plan, forced=True, remarks=remarks)


def plain_plan(plan: Plan) -> Plan:
    """Return the plan with only the techniques that belong to the method."""
    return dataclasses.replace(plan, steps=tuple(step for step in plan.steps if not step.technique.touches), estimate=None)


def ablate(prepared: Prepared, subjects: Sequence[Subject], notebook: Notebook) -> dict[str, Any]:
    """Measure profile, bounds, control, memory, parity, leaving out and ladder; return the findings of a study.

    The results are in `subjects` too. Raises RunFailed if the plan cannot run.
    """
    measured = [subject for subject in subjects if not subject.is_of_the_method]
    none = plain_plan(prepared.plan)
    full, plain, budget_s = notebook.arm(prepared.plan, "full plan"), notebook.arm(none, "no technique"), notebook.left_s()
    _check_that_it_runs(full, measured, notebook)
    profiles = _profile(plain, full, measured, notebook)
    control = notebook.noise("the full plan", full, notebook.share_s([1.0, 9.0]))
    for subject in measured:
        _examine(subject, prepared, notebook, until_s=FOR_TIMING * budget_s)
    timed = [subject for subject in measured if not subject.why and _can_matter(subject, notebook)]
    whole = none.steps + tuple(subject.step for subject in measured if not subject.forced)
    weights = [*[LEFT_OUT] * len(timed), TOTAL, *[RUNG] * len(measured)]
    for number, subject in enumerate(timed):
        _leave_out(subject, notebook, weights[number:])
    total = _total(plain, full, notebook, weights[len(timed):]) if len(whole) == len(prepared.plan.steps) else None
    _climb(measured, none, prepared.facts, notebook)
    _look_again(timed, notebook)
    for subject in subjects:
        _judge(subject, notebook)
    return {"recipe": list(notebook.words), "profile": {name: to_plain(profile) for name, profile in profiles.items()},
            "control": control, "total": total, "techniques": [_row(subject, notebook) for subject in subjects]}


# ------------------------------------------------------------------------------------------------ before timing


def _check_that_it_runs(full: Arm, measured: Sequence[Subject], notebook: Notebook) -> None:
    """Probe the full plan. Raises RunFailed where it cannot run, because then there is no plan to measure."""
    notebook.say("trying the full plan, and the memory that it takes")
    if (error := notebook.probe(full).error) is not None:
        raise RunFailed(error)
    for subject in measured:
        if subject.forced and (error := notebook.probe(subject.arms(notebook)[1]).error) is not None:
            raise RunFailed(error)


def _profile(plain: Arm, full: Arm, measured: Sequence[Subject], notebook: Notebook) -> dict[str, Profile]:
    """Return profiles of both plans, and set the bound of each technique; without a profile no bound is known."""
    profiles = notebook.profile("a step without any technique, and one of the full plan", plain, full)
    for subject in measured if profiles else ():
        # what a technique adds that the plan leaves off is in no other profile
        ours = notebook.arena.profile(subject.arms(notebook)[1]) if subject.forced else profiles[1]
        acts_on = subject.step.technique.acts_on
        limit = bound(profiles[0], ours, acts_on)
        subject.bound = limit if math.isfinite(limit) else None
        notebook.say(f"{subject.name}: no bound, it acts on all of a step" if subject.bound is None else
                     f"{subject.name}: at most {limit:.2f} times as fast or as slow (it acts on {', '.join(sorted(acts_on))})")
    return dict(zip(("plain", "plan"), profiles, strict=False))


def _examine(subject: Subject, prepared: Prepared, notebook: Notebook, *, until_s: float) -> None:
    """Find the plan without the technique, and compare memory and losses of both plans."""
    if notebook.left_s() < until_s:
        subject.remarks.append("memory and losses were not measured within the budget")
        return
    notebook.say(f"{subject.name}: memory and losses with and without it")
    if not _separate(subject, prepared.facts, notebook):
        return
    without, with_it = map(notebook.probe, subject.arms(notebook))
    if with_it.allocated_bytes is not None and without.allocated_bytes is not None:
        subject.memory_bytes = with_it.allocated_bytes - without.allocated_bytes
    technique, none = subject.step.technique, plain_plan(prepared.plan)
    alone, both = (none, planner.with_steps(none, [subject.step])), (subject.without, subject.with_it)
    subject.parity, why = notebook.parity(technique.exactness.name, [alone, both], prepared.facts, prepared.recipe.seed)
    if why:
        subject.remarks.append(f"losses could not be compared: {why}")


def _separate(subject: Subject, facts: Facts, notebook: Notebook) -> bool:
    """Find a plan without the technique that runs, by also leaving out the techniques that depend on it."""
    while (why := why_no_room(subject.without, facts)) is None:
        found = notebook.probe(subject.arms(notebook)[0])
        why = found.error
        if why is None:
            return True
        named = [step.technique.name for step in subject.without.steps
                 if step.technique.touches and step.technique.name == found.technique]
        if not named or subject.forced:
            break
        subject.without = subject.without.without(named[0])
        subject.remarks.append(f"{named[0]} was left out too, because it needs {subject.name}")
    subject.why = f"the plan does not run without it: {why}"
    return False


# ------------------------------------------------------------------------------------------------ timing


def _leave_out(subject: Subject, notebook: Notebook, weights: Sequence[float]) -> None:
    if not notebook.reaches():
        subject.why = LATER
        return
    notebook.say(f"{subject.name}: the plan without it against the plan with it")
    subject.left_out, why = notebook.attempt(subject.name, *subject.arms(notebook), notebook.share_s(weights))
    subject.why = f"it could not be timed: {why}" if subject.left_out is None else ""


def _look_again(timed: Sequence[Subject], notebook: Notebook) -> None:
    """Measure undecided techniques again on fresh windows, with the remaining time."""
    undecided = [subject for subject in timed if subject.left_out is not None
                 and notebook.comparisons[subject.left_out].verdict == INCONCLUSIVE]
    for number, subject in enumerate(undecided):
        share_s = notebook.share_s([1.0] * (len(undecided) - number))
        if share_s < MORE_PAIRS * PAIR_S:
            return
        assert subject.left_out is not None
        pairs = notebook.comparisons[subject.left_out].pairs
        notebook.say(f"{subject.name}: undecided after {pairs} pairs of windows; measuring again with the remaining time")
        index, _ = notebook.attempt(subject.name, *subject.arms(notebook), share_s, pairs=int(share_s / PAIR_S), anew=True)
        subject.left_out = subject.left_out if index is None else index


def _can_matter(subject: Subject, notebook: Notebook) -> bool:
    """Return whether the bound allows an effect beyond the margin of this study."""
    return subject.bound is None or subject.bound >= 1 + min(notebook.margin, TOO_NOISY)


def _total(plain: Arm, full: Arm, notebook: Notebook, weights: Sequence[float]) -> int | None:
    if not notebook.reaches():
        notebook.say("no technique against the full plan: not reached within the budget")
        return None
    notebook.say("no technique against the full plan")
    return notebook.attempt("the full plan", plain, full, notebook.share_s(weights))[0]


def _climb(measured: Sequence[Subject], below: Plan, facts: Facts, notebook: Notebook) -> None:
    """Measure the ladder from no technique up; a technique that cannot run yet, or cannot matter, joins the next rung."""
    joined: list[Subject] = []
    here, foot_name = below, "no technique"
    for number, subject in enumerate(measured):
        joined.append(subject)
        if not any(_can_matter(one, notebook) for one in joined):
            continue
        above, top_name = planner.with_steps(here, [one.step for one in joined]), f"ladder up to {subject.name}"
        if not notebook.reaches():
            notebook.say(f"the ladder from {joined[0].name} on: not reached within the budget")
            return
        notebook.say(f"ladder: {' and '.join(one.name for one in joined)} on top of {foot_name}")
        index, why = None, why_no_room(here, facts) or why_no_room(above, facts)
        if why is None:
            index, why = notebook.attempt("ladder", notebook.arm(here, foot_name), notebook.arm(above, top_name),
                                          notebook.share_s([RUNG] * (len(measured) - number)))
        if index is None:
            notebook.say(f"ladder: {subject.name} joins the next technique ({why})")
            subject.remarks.append(f"in the ladder it joins the next technique, because it cannot run alone there: {why}")
            continue
        for one in joined:
            one.ladder = index
        here, foot_name, joined = above, top_name, []


# ------------------------------------------------------------------------------------------------ verdicts


def _judge(subject: Subject, notebook: Notebook) -> None:
    """Set the verdict and its reason. A plan that learns something else is no gain, however fast."""
    if subject.is_of_the_method:
        subject.verdict, subject.why = NOT_HERE, "it is part of the recipe's method: without it the run would train " \
                                                 "something else"
        return
    if subject.parity is not None and not subject.parity.holds:
        subject.verdict, subject.why = INVALID, f"it changes what is learned: {subject.parity.because}"
    elif subject.left_out is not None:
        comparison = notebook.comparisons[subject.left_out]
        subject.verdict, subject.why = comparison.verdict, comparison.because
    elif not subject.why and subject.bound is not None:  # it could run, and was left untimed
        subject.verdict = NO_EFFECT
        subject.why = f"at most {subject.bound:.3f} times as fast or as slow by its share of a step, which is within the " \
                      f"margin of {notebook.margin:.1%}: not timed"
    subject.why = "; ".join([subject.why, *subject.remarks])


def _row(subject: Subject, notebook: Notebook) -> dict[str, Any]:
    technique = subject.step.technique
    speed: Interval | None = None if subject.left_out is None else notebook.comparisons[subject.left_out].speed
    return {"name": subject.name, "settings": to_plain(technique), "exactness": technique.exactness.name,
            "because": subject.step.because, "claim": to_plain(subject.step.claim), "acts_on": sorted(technique.acts_on),
            "bound": subject.bound, "ladder": subject.ladder, "left_out": subject.left_out, "speed": to_plain(speed),
            "memory_bytes": subject.memory_bytes, "parity": to_plain(subject.parity), "verdict": subject.verdict,
            "why": subject.why}
