"""Rules on memory: what is kept, recomputed, offloaded or given back, and how large the passes are."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_text
from powertrain.audit.editing import added, removed, set_to
from powertrain.audit.reckoning import GIB, as_trained, at_most, needed_and_there, reckonable, recomputed_share, room
from powertrain.audit.resolved import TRAINERS, accumulation, examples_per_pass, first_set, is_on, is_unread, number, seen
from powertrain.audit.rules.base import Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.cost.fitting import largest_micro_batch, own_bytes, planned_room_bytes
from powertrain.records import Facts
from powertrain.records.findings import UNMEASURED, Expected, rule

CHECKPOINTING, KWARGS = "training.activation_checkpointing", "training.activation_checkpointing_kwargs"
EMPTYING, FINDING_BATCH = "training.torch_empty_cache_steps", "training.auto_find_batch_size"
OFFLOAD = "gradient_accumulation_kwargs"
PASS, TIMES = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
BESIDE = (PASS, "training.max_length", "training.learning_rate", "training.output_dir")
UNSET_MEANS_REENTRANT_BEFORE = (5,)          # transformers
MANY = 4                     # passes a step; fewer cost little
SHARDING = ("deepspeed.zero_optimization.stage", "accelerate.deepspeed_config.zero_stage", "training.deepspeed",
            "training.fsdp",
            "accelerate.distributed_type")
OFFLOADS = ("deepspeed.zero_optimization.offload_optimizer.device", "deepspeed.zero_optimization.offload_param.device",
            "accelerate.deepspeed_config.offload_optimizer_device", "accelerate.deepspeed_config.offload_param_device",
            "accelerate.fsdp_config.fsdp_offload_params", "fsdp.offload_params", "fsdp.cpu_offload")
PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")     # accelerate's distributed types that shard nothing


@rule("technique: activation_checkpointing; features: X4")
def checkpointing_needless(subject: Subject, where: Circumstances) -> Findings:
    """Activation checkpointing is on, although memory would hold all activations."""
    facts, space = reckonable(where), room(subject, where)
    if facts is None or space is None or is_unread(subject, CHECKPOINTING) or not is_on(subject, CHECKPOINTING):
        return
    needed, there = space
    edits = set_to(subject, CHECKPOINTING, False)
    if not edits and CHECKPOINTING not in subject.settings:
        edits = added(subject, BESIDE, "gradient_checkpointing", False)
    if needed <= there:
        yield found("moderate", f"A step that keeps all activations needs about {needed / GIB:.2f} GiB, and {there / GIB:.1f} "
                    "GiB are free: each block's forward pass runs a second time for nothing", seen(subject, CHECKPOINTING),
                    breaking="low", expected=at_most(recomputed_share(facts), "the products that are computed a second time"),
                    cure="Turn activation checkpointing off", edits=edits, words=("techniques.activation_checkpointing=off",))


@rule("documentation: torch.utils.checkpoint (use_reentrant=False is recommended)", gives_way_to=("checkpointing_needless",))
def checkpointing_reentrant(subject: Subject, where: Circumstances) -> Findings:
    """Activation checkpointing is reentrant, which torch advises against."""
    if subject.framework not in TRAINERS or is_unread(subject, KWARGS) or not is_on(subject, CHECKPOINTING):
        return
    given, version = subject.value(KWARGS), where.version("transformers")
    unset = not isinstance(given, dict) or "use_reentrant" not in given
    if isinstance(given, dict) and given.get("use_reentrant") is True:
        key, says = KWARGS, "use_reentrant=True is set"
    elif unset and version is not None and version < UNSET_MEANS_REENTRANT_BEFORE and subject.framework == "transformers":
        key, says = CHECKPOINTING, f"use_reentrant is not set, and transformers {version[0]} takes True"
    else:
        return
    yield found("low", f"{says}. The reentrant form recomputes a whole block where the other stops at the last tensor that is "
                "needed, gives adapters no gradient unless the inputs require one, and breaks torch.compile",
                subject.settings[key], expected=UNMEASURED, cure='Set gradient_checkpointing_kwargs={"use_reentrant": False}')


@rule("features: F13 (it is no matter of loading either); documentation: TrainingArguments.use_cache")
def cache_while_training(subject: Subject, where: Circumstances) -> Findings:
    """The key/value cache is on while training."""
    key = next((key for key in ("training.use_cache", "model.use_cache") if subject.value(key) is True), None)
    if key is not None:
        yield found("low", "Keys and values of past tokens are kept for generation, which training never does. With "
                    "checkpointing transformers turns the cache off again, with a warning", first_set(subject, (key,)),
                    expected=Expected("some memory", "none"), cure="Set use_cache=False", edits=set_to(subject, key, False))


@rule("technique: allocator; features: X3 (it gives torch no memory that it did not have)")
def cache_emptied(subject: Subject, where: Circumstances) -> Findings:
    """The trainer empties the allocator's cache every few steps."""
    if not subject.value(EMPTYING):
        return
    on_gpu = where.hardware is None or where.hardware.device == "cuda"
    yield found("moderate" if on_gpu else "low", "Memory that the next step needs is given back to the driver and asked for "
                "again; torch reuses its cache anyway. This helps only against fragmentation, for which there are expandable "
                "segments" if on_gpu else "There is no GPU whose cache could be emptied", subject.settings[EMPTYING],
                expected=UNMEASURED if on_gpu else Expected("none", "none"), breaking="low",
                cure="Remove it; against fragmentation set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                edits=removed(subject, EMPTYING), words=("techniques.allocator=on",) if on_gpu else ())


@rule("features: F14 (a leak is a tensor that is kept); documentation: torch FAQ, \"my model reports out of memory\"")
@of_script
def losses_kept_with_graph(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Losses are kept together with the graph that computed them."""
    for step in training_steps(script):
        names = set(_backward_of(step.node))
        for node in ast.walk(step.node):
            kept = _kept(node)
            # a sum that is itself differentiated has to keep its graph
            if isinstance(kept, ast.Name) and kept.id in names and not (
                    isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in names):
                yield found("moderate", f"{kept.id} refers to everything that computed it. Each loss that is kept holds its "
                            "graph, and memory grows with every step", step.script.evidence(node),
                            cure="Keep only its value: `loss.detach()`",
                            edits=with_text(step.script, kept, f"{kept.id}.detach()"))
                return


def _backward_of(loop: ast.AST) -> Iterator[str]:
    """Yield the variables that `.backward()` is called on, also in `scaler.scale(loss).backward()` and `(loss / "
    "4).backward()`."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            for item in (node.func.value, *node.args):
                yield from (name.id for name in ast.walk(item) if isinstance(name, ast.Name))


def _kept(node: ast.AST) -> ast.expr | None:
    """Return what is added to a sum or a list."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
        return node.args[0]
    return None


@rule("documentation: TrainingArguments.auto_find_batch_size; features: X7, F28")
def batch_found_by_failing(subject: Subject, where: Circumstances) -> Findings:
    """The trainer chooses the batch by running out of memory."""
    if subject.value(FINDING_BATCH) is True:
        yield found("low", "When memory runs out, the trainer takes fewer examples a pass and keeps the accumulation. A step "
                    "then has fewer examples, and another machine trains another run", subject.settings[FINDING_BATCH],
                    accuracy="low", edits=removed(subject, FINDING_BATCH),
                    cure="Set the batch, and let accumulation make up for smaller passes")


@rule("features: F1 (no trainer has such an argument; accelerator_config has one that offloads nothing)")
def offload_that_is_none(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for gradient accumulation with CPU offload, which no trainer has."""
    everything = {**subject.settings, **subject.unread, **subject.unknown}
    asked = next((setting for key, setting in everything.items()
                  if OFFLOAD in key.split(".") and "accelerator_config" not in key), None)
    if asked is not None:
        raises = subject.framework in TRAINERS
        yield found("critical" if raises else "moderate", f"No trainer has {OFFLOAD}: " + (
                    "TrainingArguments raises a TypeError" if raises else "nothing reads it, and nothing is offloaded"), asked,
                    expected=Expected("none: nothing was offloaded", "none"),
                    words=("techniques.activation_checkpointing=on",),
                    cure="Remove it; if memory is short, take smaller passes, or activation checkpointing")


@rule("technique: micro_batch; features: X7 (accumulation runs the same small passes; it is the pass that fills a device)")
def micro_batch_small(subject: Subject, where: Circumstances) -> Findings:
    """A step consists of many small passes, where memory would hold larger ones."""
    each, times = examples_per_pass(subject), accumulation(subject)
    if each is None or times is None or each > 2 or times < MANY or is_on(subject, "training.packing"):
        return
    facts = reckonable(where)
    larger = _larger(subject, facts, each, times) if facts else None
    if facts is not None and larger is None:
        return
    fewer = each * times // larger if larger else 0
    yield found("moderate" if larger else "low", f"A step is {times} passes of {each} "
                f"{'example' if each == 1 else 'examples'}: weights are read and kernels started {times} times; " + (
                f"{larger} examples fit here" if larger else "`powertrain plan` computes how many examples fit"),
                seen(subject, PASS), seen(subject, TIMES), expected=UNMEASURED, words=("techniques.micro_batch=on",),
                cure=f"Take {larger} examples a pass and accumulate {fewer} times" if larger else "Take the largest pass that "
                "fits, and accumulate accordingly less",
                edits=(*set_to(subject, PASS, larger), *set_to(subject, TIMES, fewer)) if larger else ())


def _larger(subject: Subject, facts: Facts, each: int, times: int) -> int | None:
    """Return the largest pass that fits and divides the step's examples, if it is twice as large or more."""
    space = planned_room_bytes(facts.hardware) - own_bytes(facts.hardware.device)
    fits = largest_micro_batch(facts.model, as_trained(subject, facts), space)
    return max((count for count in range(2 * each, each * times + 1) if count <= fits and each * times % count == 0),
               default=None)


@rule("documentation: DeepSpeed (ZeRO divides states between processes); claims: 000-19")
def sharding_one_device(subject: Subject, where: Circumstances) -> Findings:
    """ZeRO or FSDP has one device only, or offloads what would fit."""
    asked = first_set(subject, (key for key in SHARDING if subject.on(key) and subject.value(key) not in PLAIN))
    offload = first_set(subject, (key for key in OFFLOADS if subject.on(key)))
    if offload is None and "offload" in str(subject.value("training.fsdp")):
        offload = subject.settings["training.fsdp"]
    facts = reckonable(where)
    needed, there = needed_and_there(facts.model, as_trained(subject, facts), facts) if facts is not None else (1, 0)
    processes = "accelerate.num_processes"
    alone = number(subject, processes) == 1 or (
        where.hardware is not None and where.hardware.devices == 1 and not is_on(subject, processes))
    if offload is not None and needed <= there:
        yield found("moderate", f"A step takes about {needed / GIB:.2f} GiB, and {there / GIB:.1f} GiB are free: all that is "
                    "offloaded crosses the bus in each step for nothing", offload.evidence, expected=UNMEASURED, breaking="low",
                    cure="Keep everything on the device", title="weights or optimizer are offloaded although they fit")
    elif asked is not None and alone and offload is None:
        yield found("low", "ZeRO and FSDP divide states by the number of processes, which is one; their cost remains", asked,
                    subject.settings.get(processes), breaking="low", expected=Expected("no effect on memory, and none on "
                    "speed that could be measured (claim 000-19)", "study: 2026-11-21_claims"),
                    cure="Train without it on one device", title="sharding over one device")
