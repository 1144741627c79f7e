"""Whether a run fits the memory, and which words for the recipe would make it fit: each tried by planning again with it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain import planner
from powertrain.cost import weights
from powertrain.cost.fitting import largest_micro_batch, own_bytes, planned_room_bytes, total_bytes
from powertrain.cost.precision import unit_of
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.facts.software import read_software
from powertrain.models.config import make_config
from powertrain.models.kernels import pool
from powertrain.records import Facts, Hardware, ModelFacts, OnMachine, Plan, WrongUse
from powertrain.run.prepare import Prepared, planned

if TYPE_CHECKING:
    from powertrain.training.setup import Setup

WORTH_BYTES = 8 << 20        # a change that saves less is not worth naming ...
WORTH_SHARE = 0.02           # ... nor one that saves less of what is needed
NAMED = 3                    # changes that are named, of those that save the most
LEAST_BLOCK = 64             # tokens: shorter examples are no cure any more
LEAST_LAYERS, LEAST_WIDTH = 2, 64
OPTIONAL = ("activation_checkpointing", "chunked_cross_entropy", "attention_kernel", "eight_bit_adamw")
DRAWN = ("layers", "width", "heads", "kv_heads", "mlp_width", "dropout", "activation", "bias", "tied_head")


@dataclass(frozen=True)
class Saving:
    """What a change of the recipe saves at the peak."""

    words: str                               # "techniques.activation_checkpointing=on"
    bytes: int
    enough: bool                             # the run fits with this change alone


def room_bytes(facts: Facts) -> int:
    """Return what is free on the device for the tensors of a step, less what the process takes besides them."""
    return max(0, facts.hardware.free_memory_bytes - own_bytes(facts.hardware.device))


def needed_bytes(facts: Facts, plan: Plan) -> int:
    return total_bytes(facts.model, planner.workload_of(facts, plan).shared_by(facts.hardware.processes))


def checkpoint_bytes(prepared: Prepared) -> int:
    """Return what a checkpoint of such a run takes on the disk."""
    return weights.checkpoint_bytes(prepared.facts.model, planner.workload_of(prepared.facts, prepared.plan).optimizer)


def workload_of_step(workload: Workload, setup: Setup, step: int) -> Workload:
    """Return the workload with the documents that step `step` (from 0) has in its passes, an encoder's tokens included."""
    import torch

    batches = setup.prepare(step)
    documents = tuple(tuple(map(sum, zip(batch.lengths, batch.source.lengths, strict=True))) if batch.source else batch.lengths
                      for batch in batches)
    share = sum(batch.trained_tokens for batch in batches) / max(1, sum(map(sum, documents)))
    return replace(workload, documents=documents, trained_share=share, threads=torch.get_num_threads())


def with_smaller_passes(prepared: Prepared, setup: Setup, step: int) -> tuple[Prepared, Setup] | None:
    """Return plan and setup with the largest pass of `step` (from 0) about halved, at the same batch; None where impossible.

    Blocks that were compiled for the old passes run uncompiled in the new ones until the run is resumed.
    """
    pool.empty()                             # what it keeps is of other sizes, and malloc may want it
    before, plan, changed = largest_pass(setup, step), prepared.plan, setup
    because = f"passes of {before:,} tokens ran out of memory at step {step + 1:,}"
    while largest_pass(changed, step) >= before:
        found = planner.with_smaller_passes(prepared.facts, plan, prepared.total_steps, because)
        if found is None:
            return None
        plan, technique = found
        changed = technique.apply(changed)
    return replace(prepared, plan=plan), changed


def largest_pass(setup: Setup, step: int) -> int:
    """Return the slots of the largest pass of a step (from 0), of all processes together."""
    from powertrain.training.ranks import ALONE

    return max(sum(batch.lengths) + (sum(batch.source.lengths) if batch.source else 0)
               for batch in replace(setup, ranks=ALONE).prepare(step))


def refuse_what_does_not_fit(prepared: Prepared) -> None:
    """Raise WrongUse, with cures, if the run does not fit. What another library computes is not counted or refused."""
    facts, recipe = prepared.facts, prepared.recipe
    if recipe.memory_check == "off" or facts.model.provider != "native":
        return
    needed, room = needed_bytes(facts, prepared.plan), room_bytes(facts)
    if needed > room:
        raise WrongUse(f"a step needs {_gib(needed)} of memory at its peak, and {_gib(room)} are free on this "
                       f"{'machine' if facts.hardware.device == 'cpu' else 'device'} for it; {cures(prepared)}. "
                       f"If you know better than this estimate, memory_check=off trains anyway")


def cures(prepared: Prepared, *, judged: bool = True) -> str:
    """Return the changes that save the most, as words for the recipe, each with what it saves.

    `judged`: say whether that is enough for what is free, which a run that ran out of memory has refuted.
    """
    savings = savings_of(prepared)[:NAMED]
    if not savings:
        return "no known change of the recipe would save much; free some memory, or train a smaller model"
    verdicts = {True: ", which is enough", False: ", not enough alone"} if judged else {True: "", False: ""}
    return "what would help: " + "; ".join(f"{saving.words} saves {_gib(saving.bytes)}{verdicts[saving.enough]}"
                                           for saving in savings)


def savings_of(prepared: Prepared) -> list[Saving]:
    """Return the changes of the recipe that would save memory worth naming, the largest saving first."""
    room, workload = room_bytes(prepared.facts), planner.workload_of(prepared.facts, prepared.plan)
    needed = total_bytes(prepared.facts.model, workload)
    left = [(words, needed_bytes(facts, plan)) for words, facts, plan in _changes(prepared, workload, room)]
    savings = [Saving(words, needed - size, size <= room) for words, size in left]
    worth = [saving for saving in savings if saving.bytes >= max(WORTH_BYTES, WORTH_SHARE * needed)]
    return sorted(worth, key=lambda saving: -saving.bytes)


def on_machines(prepared: Prepared, machines: Mapping[str, Hardware]) -> list[OnMachine]:
    """Return the run on each machine: where it fits as it is, the fastest first; then where a change makes it fit.

    Machines whose time leaves out the exchanges between devices come after those of which it is known.
    """
    found = [_on_machine(prepared, kind, hardware) for kind, hardware in machines.items()]
    return sorted(found, key=lambda one: (one.words is None, bool(one.words), one.estimate is None,
                                          one.estimate is not None and one.estimate.leaves_out_exchanges,
                                          sum(one.estimate.step_s) if one.estimate else 0.0))


def _on_machine(prepared: Prepared, kind: str, hardware: Hardware) -> OnMachine:
    try:
        there = planned(prepared.material, hardware, read_software(hardware), None)
    except WrongUse as error:
        return OnMachine(kind, hardware, None, None, None, str(error))
    needed, room, counted_on = needed_bytes(there.facts, there.plan), room_bytes(there.facts), planned_room_bytes(hardware)
    if there.facts.model.provider != "native" or needed <= room:
        return OnMachine(kind, hardware, "", there.plan.estimate, needed, is_tight=needed > counted_on)
    for words, facts, plan in _changes(there, planner.workload_of(there.facts, there.plan), room):
        if (smaller := needed_bytes(facts, plan)) <= room:
            return OnMachine(kind, hardware, words, plan.estimate, smaller, is_tight=smaller > counted_on)
    return OnMachine(kind, hardware, None, None, needed)


def _changes(prepared: Prepared, workload: Workload, room: int) -> Iterator[tuple[str, Facts, Plan]]:
    """Yield the words of each change that a plan can be made with, what it changes in the facts, and the plan."""
    facts, recipe = prepared.facts, prepared.recipe
    in_force = prepared.plan.names
    pins: list[tuple[str, str, Any]] = [(f"{name}.{setting}={count}", name, {setting: count})
                                        for name, setting, count in _smaller_passes(facts.model, workload, room)]
    optional = (*OPTIONAL, "bf16") if unit_of(facts.hardware, "bf16") is not None else OPTIONAL
    pins += [(f"{name}=on", name, "on") for name in optional if name not in in_force]
    tried = [(f"techniques.{words}", facts, recipe.model_copy(update={"techniques": {**recipe.techniques, name: pin}}))
             for words, name, pin in pins]
    tried += [(words, changed, recipe) for words, changed in (*_other_methods(facts), *_shorter_examples(facts),
                                                              *_smaller_models(prepared, workload, room))]
    for words, changed, wanted in tried:
        with contextlib.suppress(WrongUse):
            yield words, changed, planner.make_plan(changed, wanted, prepared.total_steps)


def _smaller_passes(model: ModelFacts, workload: Workload, room: int) -> Iterator[tuple[str, str, int]]:
    """Yield the technique that sets the size of a pass, with its setting and the largest value that fits, at least 1."""
    examples = max(1, largest_micro_batch(model, workload, room))
    if workload.packed_tokens is not None:
        yield "packing", "tokens", max(1, examples * workload.block)
    elif examples < workload.micro_batch:
        yield "micro_batch", "examples", examples


# ------------------------------------------------------------------------------------------------ changes of what is learned


def _other_methods(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield, for a pretrained model: adapters instead of all weights, and a base in 4 bits where bitsandbytes is there."""
    model = facts.model
    lora = _with_adapters(model) if model.method == "full" else model
    if model.method == "full":
        yield "method=lora", replace(facts, model=lora)
    if model.method in ("full", "lora") and "bitsandbytes" not in facts.software.missing:
        four_bit = replace(lora, method="qlora", frozen_dtype="nf4", unquantised_dtype=lora.frozen_dtype)
        yield "method=qlora", replace(facts, model=four_bit)


def _with_adapters(model: ModelFacts, rank: int = 16) -> ModelFacts:
    """Return the model as LoRA trains it by default: adapters of rank 16 on all linears of the blocks."""
    adapters: dict[str, tuple[int, ...]] = {}
    for name, shape in model.shapes.items():
        if re.fullmatch(r"blocks\.0\.(qkv|attention_out|mlp_in|mlp_out)\.weight", name):
            outputs, inputs = shape
            stem = f"{name.removesuffix('.weight')}.adapters.all"
            adapters |= {f"{stem}.A": (rank, inputs), f"{stem}.B": (outputs, rank)}
    count = model.layers * sum(rows * columns for rows, columns in adapters.values())
    return replace(model, method="lora", adapter_parameters=count, parameters=model.parameters + count, trainable=count,
                   adapted_layers=tuple(range(model.layers)), shapes={**model.shapes, **adapters})


def _shorter_examples(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """Yield half the length: of blocks, or the limit of examples."""
    data = facts.data
    half = (data.block if data.kind == "blocks" else max(data.max_length, data.block)) // 2
    if half < LEAST_BLOCK:
        return
    if data.kind == "blocks":
        yield f"data.block={half}", replace(facts, data=replace(data, block=half, stride=min(data.stride, half)))
    else:
        lengths = {name: min(tokens, half) for name, tokens in data.length_quantiles.items()}
        cut = replace(data, max_length=half, block=min(data.block, half), length_quantiles=lengths)
        yield f"data.max_length={half}", replace(facts, data=cut)


def _smaller_models(prepared: Prepared, workload: Workload, room: int) -> Iterator[tuple[str, Facts]]:
    """Yield, for training from scratch: fewer layers, or less width, halved until the model fits or can be no smaller."""
    facts, wanted = prepared.facts, prepared.recipe.model.model_dump()
    if facts.model.method != "scratch":
        return
    derived = {name for name, origin in prepared.resolved.origins.items() if origin.kind == "planner"}
    given: dict[str, Any] = {name: None if f"model.{name}" in derived else wanted[name] for name in DRAWN}
    for key, least in (("layers", LEAST_LAYERS), ("width", LEAST_WIDTH)):
        size, smaller = getattr(facts.model, key), None
        while size // 2 >= least and (smaller is None or total_bytes(smaller, workload) > room):
            size = size // 2
            config, _ = make_config(facts.model.family, vocabulary=facts.model.vocabulary, context=facts.model.context,
                                    **{**given, key: size})
            smaller = model_facts(config)
        if smaller is not None:
            yield f"model.{key}={size}", replace(facts, model=smaller)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**28 else f"{size_bytes / 2**20:.0f} MiB"
