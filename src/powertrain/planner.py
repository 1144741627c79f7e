"""Facts and a recipe in, a plan out: ask every technique, keep one per slot, write down every reason."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from functools import reduce
from typing import Any

from powertrain.cost.estimate import estimate
from powertrain.cost.workload import Workload
from powertrain.recipe import Recipe
from powertrain.records import Effect, Estimate, Facts, Plan, Proposal, Refusal, UnknownFact, WrongUse, to_plain
from powertrain.techniques import CATALOGUE, Technique

BY_NAME: Mapping[str, type[Technique]] = {technique.name: technique for technique in CATALOGUE}


def make_plan(facts: Facts, recipe: Recipe, total_steps: int) -> Plan:
    """Raises WrongUse where the recipe pins a technique that is unknown, is refused, or has no such setting."""
    _check_pins(recipe)
    steps: list[Proposal] = []
    refused: list[Refusal] = []
    for technique in CATALOGUE:
        answer = _ask(technique, facts, recipe)
        if isinstance(answer, Refusal):
            refused.append(answer)
        elif (rival := _holder(steps, technique.slot)) is None:
            steps.append(answer)
        else:
            winner, loser = _settle(rival, answer, recipe)
            steps = [step for step in steps if step is not loser] + ([winner] if winner is answer else [])
            refused.append(Refusal(loser.technique.name, f"{winner.technique.name} takes its place", loser.technique))
    plan = Plan(tuple(steps), tuple(refused))
    return dataclasses.replace(plan, estimate=_estimate(facts, plan, total_steps))


def workload_of(facts: Facts, plan: Plan) -> Workload:
    """The optimizer step's arithmetic as the plan carries it out."""
    data = facts.data
    plain = Workload(examples=data.train_batch_size, block=data.block, micro_batch=data.train_batch_size,
                     trained_share=data.trained_share)
    return reduce(lambda workload, step: step.technique.reckon(workload), plan.steps, plain)


def _estimate(facts: Facts, plan: Plan, total_steps: int) -> Estimate | None:
    try:
        return estimate(facts.model, workload_of(facts, plan), facts.hardware, total_steps)
    except UnknownFact:
        return None


def _check_pins(recipe: Recipe) -> None:
    for name in recipe.techniques:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise WrongUse(f"there is no technique {name!r}{hint} (known: {', '.join(BY_NAME)})")


def _ask(technique: type[Technique], facts: Facts, recipe: Recipe) -> Proposal | Refusal:
    """The technique's own answer, or what the recipe's pin makes of it."""
    pin = recipe.techniques.get(technique.name)
    if pin == "off":
        return Refusal(technique.name, "switched off by the recipe")
    answer = technique.propose(facts, recipe)
    if pin is None:
        return answer
    if isinstance(answer, Refusal):
        if answer.possible is None:
            raise WrongUse(f"techniques.{technique.name} is pinned on, and it cannot be: {answer.because}; "
                           f"take the pin out or set it to off")
        answer = Proposal(answer.possible, f"pinned by the recipe; the plan would leave it off: {answer.because}",
                          Effect((0.5, 2.0), 0, basis="guess: the plan does not expect it to pay"))
    if isinstance(pin, Mapping):
        answer = dataclasses.replace(answer, technique=_with_settings(answer.technique, pin),
                                     because=f"settings pinned by the recipe; {answer.because}")
    return answer


def _with_settings(technique: Technique, settings: Mapping[str, Any]) -> Technique:
    fields = typing.get_type_hints(type(technique))
    known = [field.name for field in dataclasses.fields(technique)]  # type: ignore[arg-type]
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            have = f"its settings are {', '.join(known)}" if known else "it has no settings, only on and off"
            raise WrongUse(f"techniques.{technique.name} has no setting {name!r}{hint} ({have})")
        if type(value) is not fields[name]:
            raise WrongUse(f"techniques.{technique.name}.{name}={value!r} should be of type {fields[name].__name__}")
    try:
        return dataclasses.replace(technique, **settings)  # type: ignore[type-var]
    except ValueError as error:
        raise WrongUse(str(error)) from None


def _holder(steps: list[Proposal], slot: str | None) -> Proposal | None:
    return next((step for step in steps if slot and step.technique.slot == slot), None)


def _settle(rival: Proposal, answer: Proposal, recipe: Recipe) -> tuple[Proposal, Proposal]:
    """(winner, loser) of two techniques for one slot: a pin wins, else the larger claimed gain."""
    pinned = [step for step in (rival, answer) if recipe.techniques.get(step.technique.name, "off") != "off"]
    if len(pinned) == 2:
        raise WrongUse(f"techniques.{rival.technique.name} and techniques.{answer.technique.name} are both pinned on, and "
                       "only one of them can be in force; take one pin out")
    winner = pinned[0] if pinned else min((rival, answer), key=lambda step: step.claim.step_time)
    return winner, answer if winner is rival else rival


def to_json(plan: Plan) -> dict[str, Any]:
    """plan.json: the only thing that a training run is told about how to be fast."""
    return {
        "steps": [{"technique": step.technique.name, "settings": to_plain(step.technique), "because": step.because,
                   "exactness": step.technique.exactness.name, "claim": to_plain(step.claim)} for step in plan.steps],
        "refused": [{"technique": refusal.technique, "because": refusal.because} for refusal in plan.refused],
        "estimate": to_plain(plan.estimate)}


def from_json(data: Mapping[str, Any]) -> Plan:
    """The plan that `to_json` wrote. Raises WrongUse for a technique that this version does not have."""
    steps = []
    for step in data["steps"]:
        if step["technique"] not in BY_NAME:
            raise WrongUse(f"the plan asks for technique {step['technique']!r}, which this version does not have "
                           f"(known: {', '.join(BY_NAME)}); use the version that wrote it")
        claim = step["claim"] | {"step_time": tuple(step["claim"]["step_time"])}
        steps.append(Proposal(BY_NAME[step["technique"]](**step["settings"]), step["because"], Effect(**claim)))
    found = data["estimate"]
    read = Estimate(**(found | {"step_s": tuple(found["step_s"])})) if found else None
    return Plan(tuple(steps), tuple(Refusal(item["technique"], item["because"]) for item in data["refused"]), read)
