"""Facts and a recipe in, a plan out: ask every technique, keep one per slot, write down every reason."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from powertrain.cost.estimate import estimate
from powertrain.cost.workload import Workload, library_workspace_bytes
from powertrain.recipe import Recipe
from powertrain.records import Effect, Estimate, Facts, Plan, Proposal, Refusal, UnknownFact, WrongUse, to_plain
from powertrain.records.evidence import Interval
from powertrain.techniques import CATALOGUE, Technique
from powertrain.techniques.micro_batch import MicroBatch

BY_NAME: Mapping[str, type[Technique]] = {technique.name: technique for technique in CATALOGUE}


@dataclass(frozen=True)
class Tuned:
    """What measuring has found better than the techniques' own answers, for runs like this one."""

    pins: Mapping[str, Any]                  # technique -> "off", or its settings
    speed: Interval                          # of the plan with these pins, over the plan without them
    date: str
    study: str
    least_steps: Mapping[str, int] = field(default_factory=dict)     # a technique's pin holds for runs of so many steps

    def because(self) -> str:
        return (f"measured on {self.date}: {self.speed.median:.2f} times as fast as without this tuning "
                f"({self.speed.low:.2f} to {self.speed.high:.2f}), study {self.study}")


def make_plan(facts: Facts, recipe: Recipe, total_steps: int, tuned: Tuned | None = None) -> Plan:
    """What measuring has found goes before a technique's own answer, and what the recipe pins before both.

    Raises WrongUse where the recipe pins a technique that is unknown, is refused, or has no such setting.
    """
    check_names(recipe.techniques)
    if tuned is not None and (pins := _pins_that_hold(tuned, facts, recipe, total_steps)):
        plan = _with_evidence(_ask_all(facts, with_pins(recipe, pins)), pins, tuned)
        plan = dataclasses.replace(plan, estimate=_estimate(facts, plan, total_steps))
        if plan.estimate is None or plan.estimate.total_memory_bytes <= facts.hardware.free_memory_bytes:
            return plan                      # less may be free than when it was tuned
    plan = _ask_all(facts, recipe)
    return dataclasses.replace(plan, estimate=_estimate(facts, plan, total_steps))


def with_pins(recipe: Recipe, pins: Mapping[str, Any]) -> Recipe:
    """The recipe with further techniques pinned; its own pins stay."""
    return recipe.model_copy(update={"techniques": {**pins, **recipe.techniques}})


def _ask_all(facts: Facts, recipe: Recipe) -> Plan:
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
    return Plan(tuple(steps), tuple(refused))


def _pins_that_hold(tuned: Tuned, facts: Facts, recipe: Recipe, total_steps: int) -> dict[str, Any]:
    """Those that the recipe leaves open, that can be with these facts, and that a run of so many steps is long enough for."""
    pins = {name: pin for name, pin in tuned.pins.items()
            if name in BY_NAME and name not in recipe.techniques and total_steps >= tuned.least_steps.get(name, 0)}
    asked = with_pins(recipe, pins)
    pins = {name: pin for name, pin in pins.items() if _can_be(BY_NAME[name], facts, asked)}
    try:
        _ask_all(facts, with_pins(recipe, pins))
    except WrongUse:                         # one of them excludes a pin of the recipe
        return {}
    return pins


def _can_be(technique: type[Technique], facts: Facts, recipe: Recipe) -> bool:
    try:
        _ask(technique, facts, recipe)
    except WrongUse:
        return False
    return True


def _with_evidence(plan: Plan, pins: Mapping[str, Any], tuned: Tuned) -> Plan:
    """The plan that says of what was tuned how that is known."""
    left_out = [name for name in tuned.pins if name not in pins]
    others = f"; there with {' and '.join(left_out)} besides, which this run leaves out" if left_out else ""
    because = tuned.because() + others
    step_time = (1 / tuned.speed.high, 1 / tuned.speed.low)
    steps = tuple(step if step.technique.name not in pins else dataclasses.replace(
        step, because=because, claim=dataclasses.replace(step.claim, step_time=step_time,
                                                         basis=f"study: {tuned.study}, with all that was tuned"))
        for step in plan.steps)
    refused = tuple(dataclasses.replace(refusal, because=because) if pins.get(refusal.technique) == "off" else refusal
                    for refusal in plan.refused)
    return dataclasses.replace(plan, steps=steps, refused=refused)


def ask_anew(name: str, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
    """The technique's own answer, whatever the recipe pins of it."""
    others = {other: pin for other, pin in recipe.techniques.items() if other != name}
    return BY_NAME[name].propose(facts, recipe.model_copy(update={"techniques": others}))


def with_steps(plan: Plan, steps: Iterable[Proposal]) -> Plan:
    """The plan with further techniques, each in its place of the catalogue and in that of its slot."""
    kept = list(plan.steps)
    for added in steps:
        slot, name = added.technique.slot, added.technique.name
        kept = [step for step in kept if step.technique.name != name and not (slot and step.technique.slot == slot)] + [added]
    order = list(BY_NAME)
    kept.sort(key=lambda step: order.index(step.technique.name))
    return dataclasses.replace(plan, steps=tuple(kept), estimate=None)


def workload_of(facts: Facts, plan: Plan) -> Workload:
    """The optimizer step's arithmetic as the plan carries it out."""
    data, hardware = facts.data, facts.hardware
    lengths = {} if data.kind == "blocks" else data.length_quantiles
    plain = Workload(examples=data.train_batch_size, block=data.block, micro_batch=data.train_batch_size,
                     trained_share=data.trained_share, lengths=lengths, device=hardware.device,
                     threads=hardware.cores if hardware.device == "cpu" else 1,
                     library_workspace_bytes=library_workspace_bytes(hardware))
    return reduce(lambda workload, step: step.technique.reckon(workload), plan.steps, plain)


def with_smaller_passes(facts: Facts, plan: Plan, total_steps: int, because: str) -> tuple[Plan, Technique] | None:
    """The plan with half as much in each forward pass at the same batch, and the technique that now decides that.

    None where nothing can be halved any more.
    """
    smaller = next((half for step in plan.steps if (half := step.technique.halved()) is not None), None)
    if smaller is None and not any(step.technique.slot == "passes" for step in plan.steps):
        smaller = MicroBatch(facts.data.train_batch_size).halved()
    if smaller is None:
        return None
    proposal = Proposal(smaller, because, Effect((1.0, 1.5), 0, basis="guess: smaller passes, for what the memory holds"))
    kept = [step for step in plan.steps if step.technique.name != smaller.name]
    steps = sorted([*kept, proposal], key=lambda step: list(BY_NAME).index(step.technique.name))
    refused = tuple(refusal for refusal in plan.refused if refusal.technique != smaller.name)
    halved = Plan(tuple(steps), refused)
    return dataclasses.replace(halved, estimate=_estimate(facts, halved, total_steps)), smaller


def _estimate(facts: Facts, plan: Plan, total_steps: int) -> Estimate | None:
    try:
        return estimate(facts.model, workload_of(facts, plan), facts.hardware, total_steps)
    except UnknownFact:
        return None


def check_names(techniques: Iterable[str]) -> None:
    """Raises WrongUse for a technique that there is not, with the one that may be meant."""
    for name in techniques:
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
    """The plan that `to_json` wrote.

    Raises WrongUse for a technique that this version does not have, and for what `to_json` cannot have written.
    """
    try:
        return _read(data)
    except WrongUse:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"the plan is not as it was written ({type(error).__name__}: {error}): it was changed by hand, or is of "
                       "another version; put the first one back, or start a new run") from None


def _read(data: Mapping[str, Any]) -> Plan:
    steps = []
    for step in data["steps"]:
        if step["technique"] not in BY_NAME:
            raise WrongUse(f"the plan asks for technique {step['technique']!r}, which this version does not have "
                           f"(known: {', '.join(BY_NAME)}); use the version that wrote it")
        claim = step["claim"] | {"step_time": tuple(step["claim"]["step_time"])}
        steps.append(Proposal(_read_technique(BY_NAME[step["technique"]], step["settings"]), step["because"], Effect(**claim)))
    found = data["estimate"]
    read = Estimate(**(found | {"step_s": tuple(found["step_s"])})) if found else None
    return Plan(tuple(steps), tuple(Refusal(item["technique"], item["because"]) for item in data["refused"]), read)


def _read_technique(technique: type[Technique], settings: Mapping[str, Any]) -> Technique:
    for name, wanted in typing.get_type_hints(technique).items():
        if name in settings and type(settings[name]) is not wanted:
            raise TypeError(f"{technique.name}.{name}={settings[name]!r} should be of type {wanted.__name__}")
    return technique(**settings)
