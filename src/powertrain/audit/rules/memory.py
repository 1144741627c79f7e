"""Rules on memory: what is kept, recomputed, offloaded or given back, and how large the passes are."""

from __future__ import annotations

import ast

from powertrain.audit.edits import added, removed, set_to, with_text
from powertrain.audit.rules.base import GIB, Findings, as_trained, at_most, code_rule, found, reckonable, room, rule
from powertrain.audit.script import Script, is_backward
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.cost.fitting import largest_micro_batch, own_bytes, planned_room_bytes
from powertrain.cost.work import recomputed_flops, training_flops
from powertrain.records import Facts

CHECKPOINTING, KWARGS = "training.activation_checkpointing", "training.activation_checkpointing_kwargs"
EMPTYING, FINDING_BATCH = "training.torch_empty_cache_steps", "training.auto_find_batch_size"
OFFLOAD = "gradient_accumulation_kwargs"
PASS, TIMES = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
BESIDE = (PASS, "training.max_length", "training.learning_rate", "training.output_dir")
UNSET_MEANS_REENTRANT_BEFORE = (5,)          # transformers
MANY = 4                     # passes a step; fewer cost little
FSDP, PROCESSES = "training.fsdp", "accelerate.num_processes"
SHARDING = ("deepspeed.zero_optimization.stage", "accelerate.deepspeed_config.zero_stage", "training.deepspeed", FSDP,
            "accelerate.distributed_type")
OFFLOADS = ("deepspeed.zero_optimization.offload_optimizer.device", "deepspeed.zero_optimization.offload_param.device",
            "accelerate.deepspeed_config.offload_optimizer_device", "accelerate.deepspeed_config.offload_param_device",
            "accelerate.fsdp_config.fsdp_offload_params", "fsdp.offload_params", "fsdp.cpu_offload")
PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")     # accelerate's distributed types that shard nothing


@rule
def checkpointing_needless(subject: Subject, where: Circumstances) -> Findings:
    """Activation checkpointing is on, although memory would hold all activations."""
    facts, space = reckonable(where), room(subject, where)
    if facts is None or space is None or subject.is_unread(CHECKPOINTING) or not subject.is_on(CHECKPOINTING):
        return
    edits = set_to(subject, CHECKPOINTING, False)
    if not edits and CHECKPOINTING not in subject.settings:
        edits = added(subject, BESIDE, "gradient_checkpointing", False)
    if space[0] <= space[1]:
        again = recomputed_flops(facts.model, [facts.data.block], 1)
        share = again / (training_flops(facts.model, [facts.data.block]) + again)
        yield found("moderate", subject.seen(CHECKPOINTING), edits=edits, needed_gib=space[0] / GIB, free_gib=space[1] / GIB,
                    expected=at_most(share, "the products that are computed a second time"))


@rule
def checkpointing_reentrant(subject: Subject, where: Circumstances) -> Findings:
    """Activation checkpointing is reentrant, which torch advises against."""
    if subject.framework not in TRAINERS or subject.is_unread(KWARGS) or not subject.is_on(CHECKPOINTING):
        return
    given, version = subject.value(KWARGS), where.version("transformers")
    unset = not isinstance(given, dict) or "use_reentrant" not in given
    if isinstance(given, dict) and given.get("use_reentrant") is True:
        yield found("low", subject.settings[KWARGS])
    elif unset and version is not None and version < UNSET_MEANS_REENTRANT_BEFORE and subject.framework == "transformers":
        yield found("low", subject.settings[CHECKPOINTING], case="unset", version=version[0])


@rule
def cache_while_training(subject: Subject, where: Circumstances) -> Findings:
    """The key/value cache is on while training."""
    key = next((key for key in ("training.use_cache", "model.use_cache") if subject.value(key) is True), None)
    if key is not None:
        yield found("low", subject.settings[key], edits=set_to(subject, key, False))


@rule
def cache_emptied(subject: Subject, where: Circumstances) -> Findings:
    """The trainer empties the allocator's cache every few steps."""
    if subject.value(EMPTYING):
        on_gpu = where.hardware is None or where.hardware.device == "cuda"
        yield found("moderate" if on_gpu else "low", subject.settings[EMPTYING], edits=removed(subject, EMPTYING),
                    case="" if on_gpu else "no GPU")


@code_rule
def losses_kept_with_graph(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Losses are kept together with the graph that computed them."""
    for step in training_steps(script):
        parts = [part for call in ast.walk(step.node) if isinstance(call, ast.Call) and is_backward(call)
                 for part in (call.func, *call.args)]
        names = {name.id for part in parts for name in ast.walk(part) if isinstance(name, ast.Name)}
        for node in ast.walk(step.node):
            kept = _kept(node)
            # a sum that is itself differentiated has to keep its graph
            if isinstance(kept, ast.Name) and kept.id in names and not (
                    isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in names):
                yield found("moderate", script.evidence(node), name=kept.id,
                            edits=with_text(script, kept, f"{kept.id}.detach()"))
                return


def _kept(node: ast.AST) -> ast.expr | None:
    """Return what is added to a sum or a list."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
        return node.args[0]
    return None


@rule
def batch_found_by_failing(subject: Subject, where: Circumstances) -> Findings:
    """The trainer chooses the batch by running out of memory."""
    if subject.value(FINDING_BATCH) is True:
        yield found("low", subject.settings[FINDING_BATCH], edits=removed(subject, FINDING_BATCH))


@rule
def offload_that_is_none(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for gradient accumulation with CPU offload, which no trainer has."""
    everything = {**subject.settings, **subject.unread, **subject.unknown}
    asked = next((setting for key, setting in everything.items()
                  if OFFLOAD in key.split(".") and "accelerator_config" not in key), None)
    if asked is not None:
        raises = subject.framework in TRAINERS
        yield found("critical" if raises else "moderate", asked, case="raises" if raises else "", key=OFFLOAD)


@rule
def micro_batch_small(subject: Subject, where: Circumstances) -> Findings:
    """A step consists of many small passes, where memory would hold larger ones."""
    each, times, facts = subject.examples_per_pass, subject.accumulation, reckonable(where)
    if each is None or times is None or each > 2 or times < MANY or subject.is_on("training.packing"):
        return
    larger = _larger(subject, facts, each, times) if facts else None
    if larger or facts is None:
        fewer = each * times // larger if larger else 0
        yield found("moderate" if larger else "low", subject.seen(PASS), subject.seen(TIMES), case="fits" if larger else "",
                    edits=(*set_to(subject, PASS, larger), *set_to(subject, TIMES, fewer)) if larger else (),
                    times=times, each=each, examples="example" if each == 1 else "examples", larger=larger, fewer=fewer)


def _larger(subject: Subject, facts: Facts, each: int, times: int) -> int | None:
    """Return the largest pass that fits and divides the step's examples, if it is twice as large or more."""
    space = planned_room_bytes(facts.hardware) - own_bytes(facts.hardware.device)
    fits = largest_micro_batch(facts.model, as_trained(subject, facts), space)
    return max((count for count in range(2 * each, each * times + 1) if count <= fits and each * times % count == 0),
               default=None)


@rule
def sharding_one_device(subject: Subject, where: Circumstances) -> Findings:
    """ZeRO or FSDP has one device only, or offloads what would fit."""
    asked = subject.first_set(key for key in SHARDING if subject.on(key) and subject.value(key) not in PLAIN)
    offload = subject.first_set(key for key in OFFLOADS if subject.on(key))
    if offload is None and "offload" in str(subject.value(FSDP)):
        offload = subject.settings[FSDP]
    needed, free = room(subject, where) or (1, 0)
    alone = subject.number(PROCESSES) == 1 or (
        where.hardware is not None and where.hardware.devices == 1 and not subject.is_on(PROCESSES))
    if offload is not None and needed <= free:
        yield found("moderate", offload, case="offloads", needed_gib=needed / GIB, free_gib=free / GIB)
    elif asked is not None and alone and offload is None:
        yield found("low", asked, subject.settings.get(PROCESSES))
