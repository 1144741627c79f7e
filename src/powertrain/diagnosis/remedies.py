"""Remedies: changes of a recipe, as words, that may cure what holds a run back, with their predicted and measured gain.

Most of what cripples a run is a pin: without the pin, the planner would have decided otherwise. So the planner is asked again
without the pins that bear on a cause, and its answer, written as pins, is the remedy. Then the remedies are tried: a few
windows of steps with the change and without, in turns, each in a process of its own. Arithmetic gives the most that a remedy
could bring; two processes measure in seconds what it does bring.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain import planner
from powertrain.diagnosis.observed import Bound, Observed, Remedy, passes_of
from powertrain.diagnosis.verdict import promise_of
from powertrain.diagnosis.wording import filled, sentences
from powertrain.evidence.clock import LEAST_PAIRS, LEAST_PARTS, Arena, CannotRun, Pace
from powertrain.recipe import Recipe
from powertrain.records import Facts, Plan, Proposal, UserError, to_plain
from powertrain.records.evidence import INVALID, Arm
from powertrain.records.findings import Cure

MOST_WORKERS = 4             # that prepare batches: each is a thread beside those that compute
PASSES = ("micro_batch", "packing", "length_grouping")       # the techniques that decide what goes into a pass
PRECISION = ("bf16", "fp16", "tf32")
BLOCKS = ("torch_compile", "fused_blocks")                   # that compile
WORTH_TRYING = 1.03          # times as fast: remedies with a smaller possible gain are not tried
PACE = Pace(window_s=0.4, pairs=LEAST_PAIRS, most_pairs=LEAST_PAIRS + 2, enough=0.05, warm_up_s=2.0)
WINDOWS = 2 * (LEAST_PAIRS + LEAST_PARTS)    # of both arms together, that a trial takes at least
Say = Callable[[str], None]
# other techniques whose pin may slow a run, with the bound that it then is
OTHERS: Mapping[str, Bound] = {"attention_kernel": Bound.COMPUTE, "chunked_cross_entropy": Bound.COMPUTE,
                               "frozen_backward": Bound.COMPUTE, "fused_adamw": Bound.OVERHEAD}


def remedies_of(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> tuple[Remedy, ...]:
    """Return the remedies that would change the plan, untried."""
    found = (*_without_pins(facts, recipe, plan, observed), *_settings(plan, observed))
    possible = [remedy for remedy in found if _planned(facts, with_words(recipe, remedy.cure.words)) is not None]
    return counted_once(possible, observed)


def counted_once(remedies: Sequence[Remedy], observed: Observed) -> tuple[Remedy, ...]:
    """Give the gain of a change that bears on several causes to the cause with the largest promise; the others name it."""
    first: dict[tuple[str, ...], Remedy] = {}
    for remedy in sorted(remedies, key=lambda one: -promise_of(one, observed)):
        first.setdefault(remedy.cure.words, remedy)
    return tuple(remedy if remedy is first[remedy.cure.words] else
                 replace(remedy, kept=1.0, basis=f"counted with {first[remedy.cure.words].against}, which has the same cure")
                 for remedy in remedies)


def with_words(recipe: Recipe, words: tuple[str, ...]) -> Recipe:
    """Return the recipe with pins written as words, as `powertrain train` reads them."""
    pins: dict[str, Any] = dict(recipe.techniques)
    for word in words:
        key, _, text = word.partition("=")
        _, name, *setting = key.split(".")
        if setting:
            before = pins.get(name)
            value = {"True": True, "False": False}.get(text, int(text) if text.lstrip("-").isdigit() else text)
            pins[name] = {**(before if isinstance(before, Mapping) else {}), setting[0]: value}
        else:
            pins[name] = text
    return recipe.model_copy(update={"techniques": pins})


def words_for(facts: Facts, recipe: Recipe, plan: Plan, other: Plan, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pins that make these techniques of `plan` as they are in the `other` plan; "off" first, which makes room."""
    now, then = _techniques(plan), _techniques(other)
    off = tuple(f"techniques.{name}=off" for name in names if name not in then and (name in now or name in recipe.techniques))
    on: tuple[str, ...] = ()
    for name in names:
        if name in then and then[name] != now.get(name):
            plainly = (f"techniques.{name}=on",)
            same = _planned(facts, with_words(recipe, (*off, *plainly)))
            settings = tuple(f"techniques.{name}.{key}={value}" for key, value in then[name].items())
            is_plain = not settings or (same is not None and _techniques(same).get(name) == then[name])
            on += plainly if is_plain else settings
    return (*off, *on)


def _techniques(plan: Plan) -> dict[str, dict[str, Any]]:
    return {step.technique.name: to_plain(step.technique) for step in plan.steps}


def _planned(facts: Facts, recipe: Recipe) -> Plan | None:
    try:
        return planner.make_plan(facts, recipe, 1)
    except UserError:
        return None


def unpinned(facts: Facts, recipe: Recipe, names: tuple[str, ...]) -> Plan | None:
    """Return the plan without the pins of these techniques; None where none is pinned, or no plan is possible."""
    if not any(name in recipe.techniques for name in names):
        return None
    pins = {name: pin for name, pin in recipe.techniques.items() if name not in names}
    return _planned(facts, recipe.model_copy(update={"techniques": pins}))


def _remedy(against: Bound, kept: float | None, words: tuple[str, ...] = (), **figures: Any) -> Remedy:
    """Return the remedy of bounds.toml with these figures; `words` where its entry has none."""
    entry = {key: filled(text, figures) for key, text in sentences()["remedy"][against.name.lower()].items()}
    return Remedy(against, Cure(entry["says"], words=words or entry.get("words", ())), kept=kept, basis=entry["basis"])


def _settings(plan: Plan, observed: Observed) -> Iterator[Remedy]:
    """Yield remedies that set what the observed figures ask for, whatever the planner would decide."""
    data_s = observed.parts.get("data", 0.0)
    rest_s = max(1e-6, sum(observed.parts.values()) - data_s)
    before = next((int(getattr(step.technique, "workers", 0)) for step in plan.steps if step.technique.name == "loader"), 0)
    # a worker prepares whole batches; with some workers, the step already waits for a part of that time only
    workers = min(MOST_WORKERS, max(before + 1, math.ceil((data_s + before * rest_s) / rest_s)))
    if data_s and workers > before:
        left_s = max(0.0, (data_s + before * rest_s) / workers - rest_s)
        yield _remedy(Bound.DATA, min(1.0, left_s / data_s), workers=workers, ahead=2 * workers)
    if observed.threads_share < 1:
        kept = observed.overhead_s / observed.computing_s if observed.computing_s else 1.0
        yield _remedy(Bound.THREADS, kept, cores=observed.cores)
    if observed.recompute_flops and not observed.recomputing_is_needed:
        yield _remedy(Bound.CAPACITY, 0.0)
    for step in plan.steps if observed.recompilations else ():
        if step.technique.name in BLOCKS or "blocks" in step.technique.slots:
            yield _remedy(Bound.RECOMPILATION, 0.0, name=step.technique.name)


def _without_pins(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    """Undo pins that the planner would decide otherwise."""
    for against, names, effect in PINNED:
        other = unpinned(facts, recipe, names)
        found = None if other is None else effect(facts, other, observed)
        if other is not None and found is not None:
            kept, figures = found
            yield _remedy(against, kept, words_for(facts, recipe, plan, other, names), **figures)
    for name, against in OTHERS.items():     # no formula predicts their gain, so they have to be tried
        other = unpinned(facts, recipe, (name,))
        if other is not None and (words := words_for(facts, recipe, plan, other, (name,))):
            answer = planner.ask_anew(name, facts, recipe)
            says = "use the planner's choice" if isinstance(answer, Proposal) else "turn it off"
            yield Remedy(against, Cure(f"{name}: {says}", words=words))


Effect = tuple[float | None, dict[str, Any]] | None          # the share that is kept, and figures; None: it would not help


def _larger_passes(facts: Facts, other: Plan, observed: Observed) -> Effect:
    """Return the effect of fewer, larger passes, which start fewer operators and have larger products."""
    passes = passes_of(facts, other)
    if passes >= observed.passes:
        return None
    saved_s = None if observed.pass_s is None else observed.pass_s * (observed.passes - passes)
    kept = max(0.0, 1 - saved_s / observed.overhead_s) if saved_s is not None and observed.overhead_s else None
    return kept, {"passes": passes, "passes_now": observed.passes}


def _less_padding(facts: Facts, other: Plan, observed: Observed) -> Effect:
    share = planner.workload_of(facts, other).padding_share
    padding = observed.real_tokens * share / (1 - share)
    if padding >= observed.padding_tokens:
        return None
    packs = "packing" in other.names
    return padding / observed.padding_tokens, {
        "what": "pack examples end to end" if packs else "put examples of similar length into one pass"}


def _faster_products(facts: Facts, other: Plan, observed: Observed) -> Effect:
    dtype, peaks = planner.workload_of(facts, other).dtype, observed.peak_flops_per_s
    kept = peaks.get(observed.dtype, 0.0) / peaks[dtype] if dtype in peaks else 0.0
    return (kept, {"dtype": dtype, "dtype_now": observed.dtype, "times": 1 / kept}) if 0 < kept < 1 else None


# bound, the techniques whose pins bear on it, and the effect of the plan without those pins
PINNED: tuple[tuple[Bound, tuple[str, ...], Callable[[Facts, Plan, Observed], Effect]], ...] = (
    (Bound.OVERHEAD, PASSES, _larger_passes), (Bound.PADDING, PASSES, _less_padding),
    (Bound.COMPUTE, PRECISION, _faster_products))


# ------------------------------------------------------------------------------------------------ trying them


def try_remedies(words: Sequence[str], observed: Observed, remedies: Sequence[Remedy], *, cache: Path, deadline: float,
                 start_s: float, say: Say, preload: Sequence[str] = ()) -> tuple[Remedy, ...]:
    """Return the remedies, tried in the order of their promise until `deadline` (of time.monotonic()).

    `start_s`: seconds that an arm's process takes until its first step.
    """
    tried = list(remedies)
    with Arena(cache, preload=preload) as arena:
        for place, remedy in sorted(enumerate(remedies), key=lambda one: -promise_of(one[1], observed)):
            # a remedy against occasional compiling shows in whole runs only, not in a few windows
            if promise_of(remedy, observed) < WORTH_TRYING or remedy.against == Bound.RECOMPILATION:
                continue
            if time.monotonic() + expected_s(observed, start_s) > deadline:
                say(f"no time left to try {' '.join(remedy.cure.words)}; use a larger --budget")
                continue
            tried[place] = _tried(arena, words, remedy, deadline, say)
    return tuple(tried)


def expected_s(observed: Observed, start_s: float) -> float:
    """Return the seconds of a trial: two processes start, and both take their windows."""
    return 2 * start_s + WINDOWS * max(*observed.step_s, PACE.window_s)


def _tried(arena: Arena, words: Sequence[str], remedy: Remedy, deadline: float, say: Say) -> Remedy:
    changed = " ".join(remedy.cure.words)
    say(f"trying {changed}")
    try:
        found, _, _ = arena.compare(Arm("as it is", tuple(words)), Arm(changed, (*words, *remedy.cure.words)), PACE,
                                    deadline=deadline)
    except CannotRun as error:
        return replace(remedy, speed=1.0, basis=f"measured: the run fails ({error})")
    if found.speed is None or found.verdict == INVALID:
        return replace(remedy, speed=1.0, basis=f"measured: {found.because}")
    return replace(remedy, speed=found.speed.median, basis=f"measured: steps {found.speed.median:.2f} times as fast with it "
                   f"({found.speed.low:.2f} to {found.speed.high:.2f}, {found.pairs} pairs of windows)")
