"""Remedies: changes of a recipe, as words, that may cure what holds a run back, with their predicted and measured gain.

Most of what cripples a run is a pin: without the pin, the planner would have decided otherwise. So the planner is asked again
without the pins that bear on a cause, and its answer, written as pins, is the remedy. Then the remedies are tried: a few
windows of steps with the change and without, in turns, each in a process of its own. Arithmetic gives the most that a remedy
could bring; two processes measure in seconds what it does bring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain import planner
from powertrain.cost.workload import Workload
from powertrain.diagnosis.observed import Bound, Observed, Remedy
from powertrain.diagnosis.shares import computing_seconds, overhead_seconds
from powertrain.diagnosis.verdict import promise_of
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
    found = (*_against_waiting(recipe, plan, observed), *_larger_passes(facts, recipe, plan, observed),
             *_less_padding(facts, recipe, plan, observed), *_faster_products(facts, recipe, plan, observed),
             *_more_threads(observed), *_no_recomputing(plan, observed), *_no_recompiling(plan, observed),
             *_other_pins(facts, recipe, plan))
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


def _against_waiting(recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    """Prepare batches ahead, so that waiting for a disk or network overlaps with computing."""
    data_s = observed.parts.get("data", 0.0)
    rest_s = max(1e-6, sum(observed.parts.values()) - data_s)
    loader = next((step.technique for step in plan.steps if step.technique.name == "loader"), None)
    before = int(getattr(loader, "workers", 0)) if loader is not None else 0
    # a worker prepares whole batches; with some workers, the step already waits for a part of that time only
    workers = min(MOST_WORKERS, max(before + 1, math.ceil((data_s + before * rest_s) / rest_s)))
    if data_s and workers > before:
        words = (f"techniques.loader.workers={workers}", f"techniques.loader.ahead={2 * workers}")
        left_s = max(0.0, (data_s + before * rest_s) / workers - rest_s)
        yield Remedy(Bound.DATA, Cure(f"let {workers} threads make batches ahead", words=words), kept=min(1.0, left_s / data_s),
                     basis="formula: loading overlaps with the step, if loading is waiting")


def _larger_passes(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    """Use fewer passes, which start fewer operators and have larger products."""
    other = unpinned(facts, recipe, PASSES)
    if other is None:
        return
    passes = _passes(planner.workload_of(facts, other))
    if passes < observed.passes:
        words = words_for(facts, recipe, plan, other, PASSES)
        yield Remedy(Bound.OVERHEAD, Cure(f"use {passes:,.3g} instead of {observed.passes:,.3g} passes per step", words=words),
                     kept=_kept_of_overhead(observed, passes), basis="formula: the measured fixed time of a pass")


def _kept_of_overhead(observed: Observed, passes: float) -> float | None:
    """Return the share of the overhead that is left with so many passes per step."""
    overhead_s = overhead_seconds(observed, sum(observed.parts.values()))
    if observed.pass_s is None or not overhead_s:
        return None
    return max(0.0, 1 - observed.pass_s * (observed.passes - passes) / overhead_s)


def _less_padding(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    other = unpinned(facts, recipe, PASSES)
    if other is None or not observed.padding_tokens:
        return
    share = planner.workload_of(facts, other).padding_share
    padding = observed.real_tokens * share / (1 - share)
    if padding < observed.padding_tokens:
        packs = any(step.technique.name == "packing" for step in other.steps)
        says = "pack examples end to end" if packs else "put examples of similar length into one pass"
        words = words_for(facts, recipe, plan, other, PASSES)
        yield Remedy(Bound.PADDING, Cure(says, words=words), kept=padding / observed.padding_tokens,
                     basis="formula: the padding that is left, estimated from the lengths")


def _faster_products(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    other = unpinned(facts, recipe, PRECISION)
    if other is None:
        return
    dtype, peaks = planner.workload_of(facts, other).dtype, observed.peak_flops_per_s
    if dtype != observed.dtype and dtype in peaks and observed.dtype in peaks and peaks[dtype] > peaks[observed.dtype]:
        kept = peaks[observed.dtype] / peaks[dtype]
        words = words_for(facts, recipe, plan, other, PRECISION)
        yield Remedy(Bound.COMPUTE, Cure(f"compute products in {dtype} instead of {observed.dtype}", words=words), kept=kept,
                     basis=f"formula: products at the measured peaks, {1 / kept:.2g} times as fast")


def _more_threads(observed: Observed) -> Iterator[Remedy]:
    if observed.threads is None or observed.threads >= observed.cores:
        return
    step_s = sum(observed.parts.values())
    computing_s = computing_seconds(observed, step_s)
    kept = overhead_seconds(observed, step_s) / computing_s if computing_s else 1.0
    yield Remedy(Bound.THREADS, Cure(f"use {observed.cores} threads, one for each core",
                               words=(f"techniques.threads.threads={observed.cores}",)), kept=kept,
                 basis="formula: products and memory traffic divide among the cores, overhead does not")


def _no_recomputing(plan: Plan, observed: Observed) -> Iterator[Remedy]:
    if observed.recompute_flops and not observed.recomputing_is_needed:
        yield Remedy(Bound.CAPACITY, Cure("keep the activations; they fit the memory",
                                    words=("techniques.activation_checkpointing=off",)), kept=0.0,
                     basis="formula: no activation is recomputed")


def _no_recompiling(plan: Plan, observed: Observed) -> Iterator[Remedy]:
    if not observed.recompilations:
        return
    for step in plan.steps:
        if step.technique.name in BLOCKS or "blocks" in step.technique.slots:
            yield Remedy(Bound.RECOMPILATION, Cure("do not compile blocks whose shapes keep changing",
                                             words=(f"techniques.{step.technique.name}=off",)), kept=0.0,
                         basis="formula: the time of compiling, measured")


def _other_pins(facts: Facts, recipe: Recipe, plan: Plan) -> Iterator[Remedy]:
    """Undo other pins that the planner would decide otherwise. No formula predicts their gain, so they have to be tried."""
    for name, against in OTHERS.items():
        other = unpinned(facts, recipe, (name,))
        if other is not None and (words := words_for(facts, recipe, plan, other, (name,))):
            answer = planner.ask_anew(name, facts, recipe)
            says = "use the planner's choice" if isinstance(answer, Proposal) else "turn it off"
            yield Remedy(against, Cure(f"{name}: {says}", words=words))


def _passes(workload: Workload) -> float:
    if workload.packed_tokens is not None:
        return float(-(-workload.tokens // workload.packed_tokens))
    return float(workload.micro_batches)


# ------------------------------------------------------------------------------------------------ trying them


def try_remedies(words: Sequence[str], observed: Observed, remedies: Sequence[Remedy], *, cache: Path, deadline: float,
                 start_s: float, say: Say, preload: Sequence[str] = ()) -> tuple[Remedy, ...]:
    """Return the remedies, tried in the order of their promise until `deadline` (of time.monotonic()).

    `start_s`: seconds that an arm's process takes until its first step.
    """
    order = sorted(range(len(remedies)), key=lambda place: -promise_of(remedies[place], observed))
    tried = list(remedies)
    with Arena(cache, preload=preload) as arena:
        for place in order:
            remedy = remedies[place]
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
    step_s = max(observed.step_s)
    return 2 * start_s + WINDOWS * max(step_s, PACE.window_s)


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
