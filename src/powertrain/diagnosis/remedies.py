"""Which changes of a recipe might cure what holds a run back, as words, with what arithmetic says of them.

Most of what cripples a run is a pin: the planner, left alone, would have decided otherwise. So it is asked again without
the pins that bear on a cause, and its answer, pinned in turn, is the remedy. Whether it helps is tried afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from powertrain import planner
from powertrain.cost.workload import Workload
from powertrain.diagnosis.observed import (
    CAPACITY,
    COMPUTE,
    DATA,
    OVERHEAD,
    PADDING,
    RECOMPILATION,
    THREADS,
    Observed,
    Remedy,
)
from powertrain.diagnosis.shares import computing_seconds, overhead_seconds
from powertrain.diagnosis.verdict import promise_of
from powertrain.recipe import Recipe
from powertrain.records import Facts, Plan, Proposal, UserError, to_plain
from powertrain.records.findings import Cure

MOST_WORKERS = 4             # that prepare batches: each is a thread beside those that compute
PASSES = ("micro_batch", "packing", "length_grouping")       # the techniques that decide what goes into a pass
PRECISION = ("bf16", "fp16", "tf32")
BLOCKS = ("torch_compile", "fused_blocks")                   # that compile
# what else a pin may slow down, with the cause that it then is
OTHERS: Mapping[str, str] = {"attention_kernel": COMPUTE, "chunked_cross_entropy": COMPUTE, "frozen_backward": COMPUTE,
                             "fused_adamw": OVERHEAD}


def remedies_of(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> tuple[Remedy, ...]:
    """None of them tried; those that would change nothing are left out."""
    found = (*_against_waiting(recipe, plan, observed), *_larger_passes(facts, recipe, plan, observed),
             *_less_padding(facts, recipe, plan, observed), *_faster_products(facts, recipe, plan, observed),
             *_more_threads(observed), *_no_recomputing(plan, observed), *_no_recompiling(plan, observed),
             *_other_pins(facts, recipe, plan))
    possible = [remedy for remedy in found if _planned(facts, with_words(recipe, remedy.cure.words)) is not None]
    return counted_once(possible, observed)


def counted_once(remedies: Sequence[Remedy], observed: Observed) -> tuple[Remedy, ...]:
    """Of a change that bears on several causes, the cause of which it promises to take most has its gain; others name it."""
    first: dict[tuple[str, ...], Remedy] = {}
    for remedy in sorted(remedies, key=lambda one: -promise_of(one, observed)):
        first.setdefault(remedy.cure.words, remedy)
    return tuple(remedy if remedy is first[remedy.cure.words] else
                 replace(remedy, kept=1.0, basis=f"counted with {first[remedy.cure.words].against}: it is the same change")
                 for remedy in remedies)


def with_words(recipe: Recipe, words: tuple[str, ...]) -> Recipe:
    """The recipe with pins that are written as words, as `powertrain train` reads them."""
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
    """Pins that make these techniques of the recipe's `plan` as they are in the `other`; off first, which makes room."""
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
    """What the planner says where nothing is pinned of these techniques; None where nothing is, or it cannot be."""
    if not any(name in recipe.techniques for name in names):
        return None
    pins = {name: pin for name, pin in recipe.techniques.items() if name not in names}
    return _planned(facts, recipe.model_copy(update={"techniques": pins}))


def _against_waiting(recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    """Batches made ahead: while the step computes, what waits for a disk or a network costs nothing."""
    data_s = observed.parts.get("data", 0.0)
    rest_s = max(1e-6, sum(observed.parts.values()) - data_s)
    loader = next((step.technique for step in plan.steps if step.technique.name == "loader"), None)
    before = int(getattr(loader, "workers", 0)) if loader is not None else 0
    # a worker is busy for all of a batch's preparation, of which the step already waits for less than all where it has some
    workers = min(MOST_WORKERS, max(before + 1, math.ceil((data_s + before * rest_s) / rest_s)))
    if data_s and workers > before:
        words = (f"techniques.loader.workers={workers}", f"techniques.loader.ahead={2 * workers}")
        left_s = max(0.0, (data_s + before * rest_s) / workers - rest_s)
        yield Remedy(DATA, Cure(f"let {workers} threads make batches ahead", words=words), kept=min(1.0, left_s / data_s),
                     basis="formula: what is made ahead is hidden behind the step, if making it is waiting")


def _larger_passes(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    """Fewer passes start fewer operators, and their products are larger."""
    other = unpinned(facts, recipe, PASSES)
    if other is None:
        return
    passes = _passes(planner.workload_of(facts, other))
    if passes < observed.passes:
        words = words_for(facts, recipe, plan, other, PASSES)
        yield Remedy(OVERHEAD, Cure(f"let a step take {passes:,.3g} instead of {observed.passes:,.3g} passes", words=words),
                     kept=_kept_of_overhead(observed, passes), basis="formula: what a pass takes however small it is, measured")


def _kept_of_overhead(observed: Observed, passes: float) -> float | None:
    """The share of the overhead that is left where a step takes so many passes."""
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
        says = "pack examples end to end" if packs else "let examples of similar length meet in a pass"
        words = words_for(facts, recipe, plan, other, PASSES)
        yield Remedy(PADDING, Cure(says, words=words), kept=padding / observed.padding_tokens,
                     basis="formula: padding that is left, estimated from the lengths")


def _faster_products(facts: Facts, recipe: Recipe, plan: Plan, observed: Observed) -> Iterator[Remedy]:
    other = unpinned(facts, recipe, PRECISION)
    if other is None:
        return
    dtype, peaks = planner.workload_of(facts, other).dtype, observed.peak_flops_per_s
    if dtype != observed.dtype and dtype in peaks and observed.dtype in peaks and peaks[dtype] > peaks[observed.dtype]:
        kept = peaks[observed.dtype] / peaks[dtype]
        words = words_for(facts, recipe, plan, other, PRECISION)
        yield Remedy(COMPUTE, Cure(f"compute products in {dtype} instead of {observed.dtype}", words=words), kept=kept,
                     basis=f"formula: products at the measured peaks, {1 / kept:.2g} times as fast")


def _more_threads(observed: Observed) -> Iterator[Remedy]:
    if observed.threads is None or observed.threads >= observed.cores:
        return
    step_s = sum(observed.parts.values())
    computing_s = computing_seconds(observed, step_s)
    kept = overhead_seconds(observed, step_s) / computing_s if computing_s else 1.0
    yield Remedy(THREADS, Cure(f"compute with {observed.cores} threads, one for each core",
                               words=(f"techniques.threads.threads={observed.cores}",)), kept=kept,
                 basis="formula: products and memory traffic divide among the cores, the rest does not")


def _no_recomputing(plan: Plan, observed: Observed) -> Iterator[Remedy]:
    if observed.recompute_flops and not observed.recomputing_is_needed:
        yield Remedy(CAPACITY, Cure("keep the activations: the memory holds them",
                                    words=("techniques.activation_checkpointing=off",)), kept=0.0,
                     basis="formula: nothing is computed a second time")


def _no_recompiling(plan: Plan, observed: Observed) -> Iterator[Remedy]:
    if not observed.recompilations:
        return
    for step in plan.steps:
        if step.technique.name in BLOCKS or "blocks" in step.technique.slots:
            yield Remedy(RECOMPILATION, Cure("do not compile what meets other shapes again and again",
                                             words=(f"techniques.{step.technique.name}=off",)), kept=0.0,
                         basis="formula: the time of compiling, measured")


def _other_pins(facts: Facts, recipe: Recipe, plan: Plan) -> Iterator[Remedy]:
    """What the planner would do otherwise than further pins say. Arithmetic says nothing of these: they have to be tried."""
    for name, against in OTHERS.items():
        other = unpinned(facts, recipe, (name,))
        if other is not None and (words := words_for(facts, recipe, plan, other, (name,))):
            answer = planner.ask_anew(name, facts, recipe)
            says = "leave it to the planner" if isinstance(answer, Proposal) else "leave it off"
            yield Remedy(against, Cure(f"{name}: {says}", words=words))


def _passes(workload: Workload) -> float:
    if workload.packed_tokens is not None:
        return float(-(-workload.tokens // workload.packed_tokens))
    return float(workload.micro_batches)
