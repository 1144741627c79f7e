"""Facts and a recipe in, a plan out: ask every technique once, keep one per slot, write down every reason.

Techniques are asked in the order of CATALOGUE, those marked `asked_first` before the others. Each one sees what was decided
before it. Asking has no side effects: nothing is compiled, loaded or fetched. The plan lists techniques in the order of
CATALOGUE, in which they are applied.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from powertrain.cost.estimate import estimate
from powertrain.cost.workload import Workload, attention_of, library_workspace_bytes
from powertrain.recipe import Recipe
from powertrain.records import Effect, Estimate, Facts, Plan, Proposal, Refusal, UnknownFact, WrongUse, to_plain
from powertrain.records.evidence import Interval
from powertrain.records.plan import PinError, PinRefused, PinsClash, UnknownTechnique, Why, check_settings, near, with_settings
from powertrain.techniques import CATALOGUE, Technique
from powertrain.techniques.base import CannotBuild, PlannedRun
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.techniques.sharding import Sharding

BY_NAME: Mapping[str, type[Technique]] = {technique.name: technique for technique in CATALOGUE}


def _asked() -> list[type[Technique]]:
    """Return the techniques in the order in which they are asked; of equally early ones the order of CATALOGUE."""
    return sorted(BY_NAME.values(), key=lambda technique: not technique.asked_first)


def _place(name: str) -> int:
    """Return the place of a technique in CATALOGUE; one that a module has added to BY_NAME stands behind."""
    return list(BY_NAME).index(name)


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
    """Return the plan: a pin of the recipe wins over what was tuned, and that over a technique's own answer.

    Raises PinError where the recipe pins a technique that is unknown or refused, has no such setting, or clashes with another.
    """
    check_pins(recipe)
    if tuned is not None and (pins := _pins_that_hold(tuned, facts, recipe, total_steps)):
        plan = _with_evidence(_plan_of(facts, with_pins(recipe, pins)), pins, tuned)
        plan = dataclasses.replace(plan, estimate=_estimate(facts, plan, total_steps))
        if plan.estimate is None or plan.estimate.total_memory_bytes <= facts.hardware.free_memory_bytes:
            return plan                      # less may be free than when it was tuned
    plan = _plan_of(facts, recipe)
    return dataclasses.replace(plan, estimate=_estimate(facts, plan, total_steps))


def with_pins(recipe: Recipe, pins: Mapping[str, Any]) -> Recipe:
    """Return the recipe with further techniques pinned; its own pins stay."""
    return recipe.model_copy(update={"techniques": {**pins, **recipe.techniques}})


def without_shares(recipe: Recipe) -> Recipe:
    """Return the recipe for one process: without pins of techniques that say how several processes share a run."""
    kept = {name: pin for name, pin in recipe.techniques.items() if not says_shares(name)}
    return recipe.model_copy(update={"techniques": kept})


def says_shares(name: str) -> bool:
    """Return whether the technique says how several processes share a run; the steps are the same with any of them."""
    return name in BY_NAME and bool(BY_NAME[name].slots & Sharding.slots)


def ask_anew(name: str, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
    """Return the technique's own answer, without the recipe's pin of it and after what is decided before it."""
    run = _before(name, facts, recipe)
    answer = _ask(BY_NAME[name], run)
    if BY_NAME[name].asked_first and isinstance(answer, Refusal) and answer.possible is not None:
        try:
            _plan_of(facts, with_pins(run.recipe, {name: "on"}))
        except PinRefused as error:          # of a need that only the finished plan shows
            return error.refusal if error.technique == name else dataclasses.replace(
                answer, because=error.refusal.because, possible=None, why=Why.CONFLICT, rival=error.technique, cure=())
    return answer


def variants_of(name: str, facts: Facts, recipe: Recipe) -> Sequence[Technique | None]:
    """Return the settings of a technique that are worth measuring here; None stands for the run without it."""
    if isinstance(answer := ask_anew(name, facts, recipe), Refusal) and answer.possible is None and BY_NAME[name].asked_first:
        return ()
    return BY_NAME[name].variants(_before(name, facts, recipe))


def _before(name: str, facts: Facts, recipe: Recipe) -> PlannedRun:
    """Return the run as technique `name` is asked about it, without the recipe's pin of it."""
    pins = {other: pin for other, pin in recipe.techniques.items() if other != name}
    recipe = recipe.model_copy(update={"techniques": pins})
    return PlannedRun.of(facts, recipe, _workload(facts, _ask_all(facts, recipe, until=name)[0]))


# ------------------------------------------------------------------------------------------------ asking


def _plan_of(facts: Facts, recipe: Recipe) -> Plan:
    _check_clashes(recipe)
    steps, refused = _ask_all(facts, recipe)
    return Plan(tuple(steps), tuple(sorted(refused, key=lambda refusal: _place(refusal.technique))))


def _ask_all(facts: Facts, recipe: Recipe, until: str = "") -> tuple[list[Proposal], list[Refusal]]:
    """Ask every technique, or those before `until`. What loses its slot to a later one is out, and all are asked again."""
    beaten: dict[str, Refusal] = {}
    while True:
        steps: list[Proposal] = []
        refused: list[Refusal] = []
        count = len(beaten)
        for technique in itertools.takewhile(lambda technique: technique.name != until, _asked()):
            answer = beaten.get(technique.name) or _ask(technique, PlannedRun.of(facts, recipe, _workload(facts, steps)))
            rival = None if isinstance(answer, Refusal) else _holder(steps, answer.technique.slots)
            if isinstance(answer, Refusal):
                refused.append(answer)
            elif rival is None:
                steps.append(answer)
            elif answer.claim.step_time < rival.claim.step_time:
                beaten[rival.technique.name] = _taken(rival, technique.name)
                break
            else:
                refused.append(_taken(answer, rival.technique.name))
        else:
            steps.sort(key=lambda step: _place(step.technique.name))
            if not until:
                beaten |= _unmet(facts, recipe, steps)
        if len(beaten) == count:
            return steps, refused


def _ask(technique: type[Technique], run: PlannedRun) -> Proposal | Refusal:
    """Return the technique's own answer, or what the recipe's pins make of it."""
    name, pin = technique.name, run.recipe.techniques.get(technique.name)
    if pin == "off":
        return Refusal(name, "the recipe switches it off", why=Why.OFF_IN_RECIPE, cure=(f"techniques.{name}=on",),
                       does=technique.does)
    answer = technique.answer(run)
    if pin is not None:
        return _pinned(answer, pin)
    rival = next((other for other in _pinned_on(run.recipe) if BY_NAME[other].slots & technique.slots), None)
    return _taken(answer, rival) if rival is not None and isinstance(answer, Proposal) else answer


def _pinned(answer: Proposal | Refusal, pin: object) -> Proposal:
    if isinstance(answer, Refusal):
        if answer.possible is None:
            raise PinRefused(answer)
        answer = Proposal(answer.possible, f"on because the recipe pins it (the planner would leave it off: {answer.because})",
                          Effect((0.5, 2.0), 0, basis="guess: the planner expects no gain", guessed=True),
                          against=dataclasses.replace(answer, possible=None))
    if isinstance(pin, Mapping):
        answer = dataclasses.replace(answer, technique=with_settings(answer.technique, pin),
                                     because=f"{answer.because}; the recipe sets {', '.join(pin)}" if pin else answer.because)
    return dataclasses.replace(answer, pinned=True)


def _taken(loser: Proposal, rival: str) -> Refusal:
    name, possible = loser.technique.name, loser.technique
    return Refusal(name, f"{rival} is used in its place", possible, Why.SLOT_TAKEN, rival=rival,
                   cure=(f"techniques.{name}=on",), does=possible.does)


def _unmet(facts: Facts, recipe: Recipe, steps: Sequence[Proposal]) -> dict[str, Refusal]:
    """Return the techniques that the finished plan leaves without something they need. Raises PinRefused for a pinned one."""
    run = PlannedRun.of(facts, recipe, _workload(facts, steps))
    found = {step.technique.name: refusal for step in steps if isinstance(step.technique, Technique)
             if (refusal := step.technique.unmet(run)) is not None}
    for name, refusal in found.items():
        if name in _pinned_on(recipe):
            raise PinRefused(refusal)
    return found


def _pinned_on(recipe: Recipe) -> list[str]:
    return [name for name, pin in recipe.techniques.items() if pin != "off" and name in BY_NAME]


def _holder(steps: Sequence[Proposal], slots: frozenset[str]) -> Proposal | None:
    return next((step for step in steps if step.technique.slots & slots), None)


# ------------------------------------------------------------------------------------------------ pins


def check_pins(recipe: Recipe) -> None:
    """Raise PinError where the recipe's techniques cannot be as they are written, on whatever machine."""
    check_names(recipe.techniques)
    _check_clashes(recipe)
    for name, pin in recipe.techniques.items():
        if isinstance(pin, Mapping):
            check_settings(BY_NAME[name], pin)
            if not hasattr(BY_NAME[name], "processes"):      # what depends on their number is left to the run
                with_settings(BY_NAME[name](), pin)


def check_names(techniques: Iterable[str]) -> None:
    """Raises UnknownTechnique, with the technique that may be meant."""
    for name in techniques:
        if name not in BY_NAME:
            raise UnknownTechnique(name, near(name, BY_NAME), tuple(BY_NAME))


def _check_clashes(recipe: Recipe) -> None:
    for one, other in itertools.combinations(sorted(_pinned_on(recipe), key=_place), 2):
        if BY_NAME[one].slots & BY_NAME[other].slots:
            raise PinsClash(one, other)


# ------------------------------------------------------------------------------------------------ tuned plans


def _pins_that_hold(tuned: Tuned, facts: Facts, recipe: Recipe, total_steps: int) -> dict[str, Any]:
    """Return the pins that the recipe leaves open, that can be used here, and whose least run length is reached."""
    pins = {name: pin for name, pin in tuned.pins.items()
            if name in BY_NAME and name not in recipe.techniques and total_steps >= tuned.least_steps.get(name, 0)}
    while pins:
        try:
            _plan_of(facts, with_pins(recipe, pins))
        except PinError as error:
            wrong = next((name for name in (error.technique, getattr(error, "rival", "")) if name in pins), None)
            if wrong is None:
                return {}
            del pins[wrong]
        else:
            break
    return pins


def _with_evidence(plan: Plan, pins: Mapping[str, Any], tuned: Tuned) -> Plan:
    """Return the plan with the measurement as the reason of everything that was tuned."""
    left_out = [name for name in tuned.pins if name not in pins]
    others = f"; that plan also had {' and '.join(left_out)}, which this run leaves out" if left_out else ""
    because = tuned.because() + others
    step_time = (1 / tuned.speed.high, 1 / tuned.speed.low)
    steps = tuple(step if step.technique.name not in pins else dataclasses.replace(
        step, because=because, pinned=False, against=None, claim=dataclasses.replace(
            step.claim, step_time=step_time, basis=f"study: {tuned.study}, with all that was tuned"))
        for step in plan.steps)
    refused = tuple(dataclasses.replace(refusal, because=because, why=Why.TUNED_OFF)
                    if pins.get(refusal.technique) == "off" else refusal for refusal in plan.refused)
    return dataclasses.replace(plan, steps=steps, refused=refused)


# ------------------------------------------------------------------------------------------------ arithmetic and changes


def with_steps(plan: Plan, steps: Iterable[Proposal]) -> Plan:
    """Return the plan with further techniques, each in its place of the catalogue and in that of its slot."""
    kept = list(plan.steps)
    for added in steps:
        slots, name = added.technique.slots, added.technique.name
        kept = [step for step in kept if step.technique.name != name and not step.technique.slots & slots] + [added]
    kept.sort(key=lambda step: _place(step.technique.name))
    return dataclasses.replace(plan, steps=tuple(kept), estimate=None)


def workload_of(facts: Facts, plan: Plan) -> Workload:
    """Return the optimizer step's arithmetic as the plan carries it out."""
    return _workload(facts, plan.steps)


def _workload(facts: Facts, steps: Iterable[Proposal]) -> Workload:
    data, hardware = facts.data, facts.hardware
    lengths = {} if data.kind == "blocks" else data.length_quantiles
    plain = Workload(examples=data.train_batch_size, block=data.block, micro_batch=data.train_batch_size,
                     trained_share=data.trained_share, lengths=lengths, device=hardware.device,
                     threads=hardware.cores if hardware.device == "cpu" else 1,
                     fused_attention=attention_of(hardware),
                     library_workspace_bytes=library_workspace_bytes(hardware), optimizer=facts.optimizer,
                     loss_has_terms=facts.loss_has_terms, reference_in_step=facts.has_reference,
                     answers=2 if data.kind in ("preference", "comparison") else 1)
    return reduce(lambda workload, step: step.technique.reckon(workload), steps, plain)


def with_smaller_passes(facts: Facts, plan: Plan, total_steps: int, because: str) -> tuple[Plan, Technique] | None:
    """Return the plan with half as much in each forward pass at the same batch, and the technique that now sets the size.

    None where nothing can be halved any more.
    """
    smaller: Any = next((half for step in plan.steps if (half := step.technique.halved()) is not None), None)
    if smaller is None and _holder(plan.steps, MicroBatch.slots) is None:
        smaller = MicroBatch(facts.data.train_batch_size).halved()
    if smaller is None:
        return None
    proposal = Proposal(smaller, because, Effect((1.0, 1.5), 0, basis="guess: smaller passes, to fit the memory", guessed=True))
    refused = tuple(refusal for refusal in plan.refused if refusal.technique != smaller.name)
    halved = dataclasses.replace(with_steps(plan, [proposal]), refused=refused)
    return dataclasses.replace(halved, estimate=_estimate(facts, halved, total_steps)), smaller


def _estimate(facts: Facts, plan: Plan, total_steps: int) -> Estimate | None:
    try:
        return estimate(facts.model, workload_of(facts, plan), facts.hardware, total_steps)
    except UnknownFact:
        return None


def with_built_code(plan: Plan) -> tuple[Plan, dict[str, str]]:
    """Compile what the plan's techniques need; return the plan with others where that fails, and technique -> what failed.

    Raises CannotBuild for a technique that the recipe pins.
    """
    failed: dict[str, str] = {}
    with ThreadPoolExecutor() as pool:       # compilers are processes of their own
        builds = [pool.submit(step.technique.build) for step in plan.steps]
    for step, built in zip(plan.steps, builds, strict=True):
        try:
            built.result()
        except CannotBuild as error:
            if step.pinned:
                raise
            failed[step.technique.name] = str(error)
            if error.instead is None:
                left = tuple(other for other in plan.steps if other.technique.name != step.technique.name)
                refusal = Refusal(step.technique.name, str(error), why=Why.PART_MISSING)
                plan = dataclasses.replace(plan, steps=left, refused=(*plan.refused, refusal))
                continue
            other = dataclasses.replace(step, technique=error.instead, because=str(error))
            plan = dataclasses.replace(with_steps(plan, [other]), estimate=plan.estimate)
    return plan, failed


# ------------------------------------------------------------------------------------------------ plan.json


def to_json(plan: Plan) -> dict[str, Any]:
    """Return plan.json: the only thing that a training run is told about how to be fast."""
    return {
        "steps": [{"technique": step.technique.name, "does": step.technique.does, "settings": to_plain(step.technique),
                   "because": step.because, "numbers": dict(step.numbers), "pinned": step.pinned,
                   "against": step.against and _plain(step.against), "exactness": step.technique.exactness.name,
                   "claim": to_plain(step.claim)} for step in plan.steps],
        "refused": [_plain(refusal) for refusal in plan.refused],
        "estimate": to_plain(plan.estimate)}


def _plain(refusal: Refusal) -> dict[str, Any]:
    return {key: value for key, value in to_plain(refusal).items() if key != "possible"}


def from_json(data: Mapping[str, Any]) -> Plan:
    """Return the plan that `to_json` wrote, or that an earlier version wrote with fewer fields.

    Raises WrongUse for a technique that this version does not have, and for what `to_json` cannot have written.
    """
    try:
        return _read(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if type(error) is WrongUse:          # of a technique that this version does not have
            raise
        raise WrongUse(f"the plan cannot be read ({type(error).__name__}: {error}): it was changed by hand, or another version "
                       "of Powertrain wrote it; restore the original plan, or start a new run") from None


def processes_of(plan: Plan) -> int:
    """Return how many processes share a run with this plan."""
    return max((getattr(step.technique, "processes", 1) for step in plan.steps), default=1)


def _read(data: Mapping[str, Any]) -> Plan:
    steps = []
    for step in data["steps"]:
        if step["technique"] not in BY_NAME:
            raise WrongUse(f"the plan asks for technique {step['technique']!r}, which this version does not have "
                           f"(known: {', '.join(BY_NAME)}); use the version that wrote it")
        claim = step["claim"] | {"step_time": tuple(step["claim"]["step_time"])}
        against = step.get("against")
        steps.append(Proposal(with_settings(BY_NAME[step["technique"]](), step["settings"]), step["because"], Effect(**claim),
                              step.get("numbers", {}), step.get("pinned", False), _refusal(against) if against else None))
    found = data["estimate"]
    intervals = {name: tuple(found[name]) for name in ("step_s", "efficiency") if found.get(name)} if found else {}
    read = Estimate(**(found | intervals)) if found else None
    return Plan(tuple(steps), tuple(map(_refusal, data["refused"])), read)


def _refusal(written: Mapping[str, Any]) -> Refusal:
    return Refusal(**{**written, "why": Why(written.get("why", Why.UNKNOWN)), "cure": tuple(written.get("cure", ()))})
