"""Rules on number formats (bf16, fp16 and its scaling, TF32) and on memory: what is kept, recomputed, offloaded, given back."""

import ast

from powertrain.audit.commands import commands, has_deepspeed
from powertrain.audit.edits import removed, renamed, set_to, with_line, with_text
from powertrain.audit.rules.base import (
    Findings,
    as_trained,
    at_most,
    code_rule,
    code_rule_once,
    found,
    known,
    reckonable,
    room,
    rule,
)
from powertrain.audit.script import Script
from powertrain.audit.steps import Step, training_steps
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import argument, every, hides_arguments, is_backward, last_name, names_in
from powertrain.audit.values import Made
from powertrain.cost.fitting import largest_micro_batch, own_bytes, planned_room_bytes
from powertrain.cost.precision import GPU_SINCE, bf16_pays, fp16_pays, gain_of, shown, unit_of
from powertrain.cost.work import recomputed_flops, training_flops
from powertrain.records import Facts
from powertrain.records.findings import UNMEASURED, Expected

FAST_PASCAL = (6, 0)         # P100: twice as many fp16 as fp32 operations; the other Pascals have 1 for each 64
FP16, BF16, TF32, MIXED = "training.fp16", "training.bf16", "training.tf32", "accelerate.mixed_precision"
CHECKPOINTING, KWARGS = "training.activation_checkpointing", "training.activation_checkpointing_kwargs"
EMPTYING, FINDING_BATCH = "training.torch_empty_cache_steps", "training.auto_find_batch_size"
OFFLOAD = "gradient_accumulation_kwargs"
PASS, TIMES = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
BESIDE_PRECISION = (PASS, "training.learning_rate", "training.num_train_epochs", "training.output_dir")
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
SCALERS = ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler")
KEEPS_CHECKPOINTS_DTYPE = (5,)               # transformers: before, from_pretrained gave fp32 where no dtype was asked for
CHECKPOINTS = known("checkpoints")
TOO_SMALL_FOR_BF16 = 4e-6    # learning rate, below which weights above 0.002 stand still, which are nearly all
SELDOM = 50                  # steps, beyond which the tens of milliseconds of an emptied cache are not felt


def asked_for(subject: Subject, key: str) -> str:
    """Return the key that asks for a precision: accelerate's, or the trainer's own."""
    return MIXED if MIXED in subject.settings else key


@rule
def bf16_without_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for bf16 on hardware that has no bf16 units."""
    hardware = where.hardware
    if hardware is None or hardware.device == "mps" or subject.products_dtype != "bf16":
        return
    asked = asked_for(subject, BF16)
    if unit_of(hardware, "bf16") is None:
        yield found("critical", asked, edits=set_to(subject, BF16, False), case="GPU" if hardware.device == "cuda" else "",
                    name=hardware.name, capability=hardware.architecture or shown(hardware.compute_capability or ()),
                    since=shown(GPU_SINCE["bf16"]))
    elif hardware.device == "cpu" and subject.framework in TRAINERS and not subject.is_on("training.use_cpu"):
        yield found("critical", asked, case="use_cpu", name=hardware.name)


@rule
def both_half_precisions(subject: Subject, where: Circumstances) -> Findings:
    """fp16 and bf16 are both on."""
    if subject.on(FP16) and subject.on(BF16):
        if subject.framework == "axolotl":       # core/builders/base.py: fp16 is passed on only where bf16 is off
            yield found("low", FP16, BF16, edits=removed(subject, FP16), case="axolotl")
        else:
            yield found("critical", FP16, BF16, edits=set_to(subject, FP16, False))


@rule
def fp16_on_bf16_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp16, with loss scaling, on hardware that has bf16."""
    fp16 = where.hardware is not None and subject.products_dtype == "fp16" and not fp16_pays(where.hardware)
    unit = unit_of(where.hardware, "bf16") if fp16 and where.hardware is not None and bf16_pays(where.hardware) else None
    if unit is not None:
        both = (*set_to(subject, FP16, False), *set_to(subject, BF16, True))
        yield found("moderate", FP16 if subject.on(FP16) else MIXED, unit=unit,
                    edits=both if BF16 in subject.settings else renamed(subject, FP16, "bf16"))


@rule
def fp16_weights_unscaled(subject: Subject, where: Circumstances) -> Findings:
    """All weights are half precision and trained under a gradient scaler, which refuses their gradients."""
    dtype, key = loaded_dtype(subject, where)
    adapted = subject.script is not None and subject.script.has_call("peft.PeftModel.from_pretrained")
    trained = subject.method == "full" and not adapted and not where.on_cpu and not _has_deepspeed(subject)
    if trained and dtype in ("fp16", "bf16") and subject.products_dtype == "fp16":
        yield found("critical", key, subject.settings.get(FP16), type=dtype, case="" if key == "model.dtype" else "checkpoint")
    script = subject.script
    scalers = [] if script is None or key != "model.dtype" or dtype != "fp16" else list(script.calls(*SCALERS))
    if script is not None and len(scalers) == 1 and argument(scalers[0], "enabled") is None and _trains_all(script) and any(
            step.is_scaler(call.owner) for step in training_steps(script) for call in step.optimizer_steps if call.owner):
        yield found("critical", key, scalers[0], case="own loop")


def _trains_all(script: Script) -> bool:
    """Return whether nothing says that only a part of the weights is trained, or that they are widened."""
    return not script.says("requires_grad", "lora", "quantization", "load_in_", "float32") and not script.has_call(
        "accelerate.Accelerator", "peft.get_peft_model", ".float")


def loaded_dtype(subject: Subject, where: Circumstances) -> tuple[str | None, str]:
    """Return the dtype that a model's weights are loaded in and the key that says it; None where that is not known."""
    key, path, script = "model.dtype", subject.value("model.path"), subject.script
    made = script.sections.get("model") if script is not None else None
    if script is None or made is None or subject.value(key) not in (None, "auto") or subject.is_unread(key):
        return subject.weights_dtype, key
    loads = last_name(made.func) == "from_pretrained" and script.name(made.func).startswith("transformers.")
    kept = loads and not hides_arguments(made) and (where.version("transformers") or (0,)) >= KEEPS_CHECKPOINTS_DTYPE
    if not kept or not isinstance(path, str) or script.says("float32") or script.has_call(".float"):
        return None, key
    return next((dtype for dtype, names in CHECKPOINTS.items() if path.startswith(tuple(names))), None), "model.path"


@code_rule_once
def fp16_without_scaler(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The training loop computes in fp16 without loss scaling."""
    if subject.value(FP16) is not True or subject.framework != "pytorch" or script.says("caler"):
        return
    kept = any(isinstance(script.statement(call), ast.Assign) for call in script.calls(".autocast", "autocast"))
    for step in training_steps(script) if "autocast" in subject.settings[FP16].spelled else ():
        if kept or any(not call.inner_loop for call in step.named(".autocast", "autocast")):
            yield found("critical", FP16, *(call.node for call in step.backward[:1]))


@rule
def fp16_without_tensor_cores(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp16 on a GPU whose fp16 is slower than its fp32."""
    hardware = where.hardware
    capability = hardware.compute_capability if hardware is not None else None
    if hardware is not None and capability is not None and subject.products_dtype == "fp16" and \
            capability < GPU_SINCE["fp16"] and capability != FAST_PASCAL:
        yield found("moderate", asked_for(subject, FP16), edits=set_to(subject, FP16, False), name=hardware.name,
                    capability=shown(capability), since=shown(GPU_SINCE["fp16"]))


@rule
def fp32_on_half_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp32 on hardware with bf16 or fp16 units."""
    hardware = where.hardware
    if hardware is None or subject.products_dtype != "fp32" or subject.weights_dtype in ("bf16", "fp16"):
        return
    if not bf16_pays(hardware) and not fp16_pays(hardware):
        return
    type_ = "bf16" if bf16_pays(hardware) else "fp16"
    gain = gain_of(hardware, type_)
    expected = UNMEASURED if gain is None else Expected(
        f"at most {gain:.1f} times as fast", f"formula: the {hardware.basis} GEMM peaks, {type_} over fp32", (1.0, gain))
    trainer = subject.framework in TRAINERS
    key = f"training.{type_}" if trainer else MIXED
    edits = set_to(subject, key, True, type_, BESIDE_PRECISION) if trainer else set_to(subject, key, type_)
    yield found("moderate", key, edits=edits, expected=expected, type=type_,
                unit=unit_of(hardware, type_))


@rule
def half_weights_trained(subject: Subject, where: Circumstances) -> Findings:
    """All weights are trained in bf16 or fp16, which rounds small updates away."""
    (dtype, key), script = loaded_dtype(subject, where), subject.script
    adapted = script is not None and script.has_call("peft.get_peft_model", "peft.PeftModel.from_pretrained")
    full = subject.method == "full" or bool(_adams_of_loaded_weights(subject))
    if dtype in ("bf16", "fp16") and full and not adapted and not _has_deepspeed(subject):
        rate = subject.number("training.learning_rate") or subject.number("optimizer.lr") or None
        still = dtype == "bf16" and 0 < (rate or 0) <= TOO_SMALL_FOR_BF16
        yield found("critical" if still else "moderate", key, type=dtype, rate=rate if dtype == "bf16" else None,
                    weight=rate * 512 if rate else None, kept=key == "model.path")


def _adams_of_loaded_weights(subject: Subject) -> list[Made]:
    """Return the torch Adams of the script's own loop that are given all weights as transformers has loaded them."""
    script = subject.script
    otherwise = ("lora", "fsdp", "FSDP", "float32", "load_in_")
    if script is None or script.says(*otherwise) or script.has_call("accelerate.Accelerator"):
        return []
    given = [(made, made.argument(0, "params")) for made in subject.calls if made.name.startswith("torch.optim.Adam")]
    return [made for made, weights in given if isinstance(weights, Made) and weights.last == "parameters" and isinstance(
        weights.owner, Made) and weights.owner.last == "from_pretrained" and weights.owner.name.startswith("transformers.")]


def _has_deepspeed(subject: Subject) -> bool:
    """Return whether DeepSpeed trains, which keeps fp32 weights and scales gradients itself: as is set, or by a command."""
    script = subject.script
    if script is None or subject.on("training.deepspeed"):
        return subject.on("training.deepspeed")
    return script.says("deepspeed") or any(has_deepspeed(script, command) for command in commands(script))


@code_rule_once
def adam_in_fp16(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Adam's epsilon is 0 in the type of the weights, fp16."""
    said = script.says("deepspeed", "requires_grad", "quantization") or script.has_call("peft.get_peft_model", *SCALERS)
    pure = subject.framework in TRAINERS and subject.method == "full" and not any(
        subject.is_unread(key) or subject.is_on(key) for key in (FP16, BF16))
    if pure and subject.weights_dtype == "fp16" and subject.effective("training.optim") == "adamw_torch" and _trains_all(
            script) and not _has_deepspeed(subject):
        yield found("critical", "training.optim", "model.dtype")
    for made in _adams_of_loaded_weights(subject) if subject.weights_dtype == "fp16" and not said else ():
        if not {"fused", "eps"} & set(made.named) and not made.open and len(made.positional) < 4:
            yield found("critical", made.node, "model.dtype")


@rule
def tf32_without_effect(subject: Subject, where: Circumstances) -> Findings:
    """TF32 is on, but nothing is computed in fp32 or the hardware has no TF32."""
    if not subject.on(TF32):
        return
    dtype, hardware, edits = subject.products_dtype, where.hardware, removed(subject, TF32)
    if hardware is not None and unit_of(hardware, "tf32") is None:
        yield found("critical" if subject.framework in TRAINERS else "low", TF32, edits=edits,
                    case="other maker" if hardware.architecture or hardware.device == "mps" else "hardware", name=hardware.name)
    elif dtype in ("bf16", "fp16"):
        yield found("low", TF32, edits=edits, type=dtype)


@code_rule
def clip_before_unscale(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are clipped while the GradScaler's factor is still in them."""
    for step in training_steps(script):
        scaled = next((call for call in step.optimizer_steps if call.owner is not None and step.is_scaler(call.owner)), None)
        unscaling = step.methods("unscale_", "unscale_gradients")
        clip = next((clip for clip in step.clipping if not any(call.order < clip.order for call in unscaling)), None)
        if scaled is not None and clip is not None:
            optimizer = script.words(scaled.node.args[0]) if scaled.node.args else "optimizer"
            unscale = f"{script.words(scaled.owner or scaled.node)}.unscale_({optimizer})"
            yield found("critical", clip.node, scaled.node, unscale=unscale, edits=with_line(script, clip.node, unscale))


@code_rule
def scaler_half_used(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A GradScaler lacks one of its parts: scaling, step, update or autocast."""
    steps = training_steps(script)
    made = next(script.calls(*SCALERS), None) if steps else None
    missing = _missing_of_scaler(script, steps) if made is not None else ""
    if made is not None and missing:
        yield found("low" if missing == "autocast" else "moderate", made, *(call.node for call in steps[0].backward[:1]),
                    case=missing)


def _missing_of_scaler(script: Script, steps: list[Step]) -> str:
    """Return which part of the scaler's use is missing; "" if none is."""
    calls = [(step, call) for step in steps for call in step.calls]
    used = {call.method for step, call in calls if call.owner is not None and step.is_scaler(call.owner)}
    if "autocast" not in script.text:
        return "autocast"
    if "scale" not in used and "step" in used:
        return "scale"
    if "scale" in used and "step" not in used and any(call.method == "step" for _, call in calls):
        return "step"
    return "update" if "step" in used and "update" not in used else ""


@rule
def checkpointing_needless(subject: Subject, where: Circumstances) -> Findings:
    """Activation checkpointing is on, although memory would hold all activations."""
    facts, space = reckonable(where), room(subject, where)
    if facts is None or space is None or subject.is_unread(CHECKPOINTING) or not subject.is_on(CHECKPOINTING):
        return
    edits = set_to(subject, CHECKPOINTING, False, "gradient_checkpointing", BESIDE)
    if space[0] <= space[1]:
        again = recomputed_flops(facts.model, [facts.data.block], 1)
        share = again / (training_flops(facts.model, [facts.data.block]) + again)
        yield found("moderate", CHECKPOINTING, edits=edits, needed_gib=space[0], free_gib=space[1],
                    expected=at_most(share, "the products that are computed a second time"))


@rule
def checkpointing_reentrant(subject: Subject, where: Circumstances) -> Findings:
    """Activation checkpointing is reentrant, which torch advises against."""
    if subject.framework not in TRAINERS or subject.is_unread(KWARGS) or not subject.is_on(CHECKPOINTING):
        return
    given, version = subject.value(KWARGS), where.version("transformers")
    unset = not isinstance(given, dict) or "use_reentrant" not in given
    if isinstance(given, dict) and given.get("use_reentrant") is True:
        yield found("low", KWARGS)
    elif unset and version is not None and version < UNSET_MEANS_REENTRANT_BEFORE and subject.framework == "transformers":
        yield found("low", CHECKPOINTING, case="unset", version=version[0])


@rule
def cache_while_training(subject: Subject, where: Circumstances) -> Findings:
    """The key/value cache is on while training."""
    key = next((key for key in ("training.use_cache", "model.use_cache") if subject.value(key) is True), None)
    if key is not None:
        yield found("low", key, edits=set_to(subject, key, False))


@rule
def cache_emptied(subject: Subject, where: Circumstances) -> Findings:
    """The trainer empties the allocator's cache every few steps."""
    if every_steps := subject.value(EMPTYING):
        seldom = isinstance(every_steps, int) and every_steps >= SELDOM
        yield found("low" if where.on_cpu or seldom else "moderate", EMPTYING, edits=removed(subject, EMPTYING),
                    case="no GPU" if where.on_cpu else "")


@code_rule_once
def losses_kept_with_graph(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Losses are kept together with the graph that computed them."""
    for step in training_steps(script):
        parts = [part for call in every(ast.Call, step.node) if is_backward(call) for part in (call.func, *call.args)]
        names = {name for part in parts for name in names_in(part)}
        for node in ast.walk(step.node):
            kept = _kept(node)
            # a sum that is itself differentiated has to keep its graph
            numbers = isinstance(kept, ast.Name) and any(last_name(value) == "item" for value in map(
                _called, script.assigned(kept)))
            if isinstance(kept, ast.Name) and kept.id in names and not numbers and not (
                    isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in names):
                yield found("moderate", node, name=kept.id, edits=with_text(script, kept, f"{kept.id}.detach()"))


def _called(value: ast.expr) -> ast.expr:
    """Return what a call calls; another expression itself."""
    return value.func if isinstance(value, ast.Call) else value


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
        yield found("low", FINDING_BATCH, edits=removed(subject, FINDING_BATCH))


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
    each, times, facts = subject.examples_per_pass, subject.accumulation, reckonable(where) if where.hardware else None
    if each is None or times is None or each > 2 or times < MANY or subject.is_on("training.packing"):
        return
    larger = _larger(subject, facts, each, times) if facts else None
    if larger or facts is None:
        fewer = each * times // larger if larger else 0
        yield found("moderate" if larger else "low", PASS, TIMES, case="fits" if larger else "",
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
    alone = subject.number(PROCESSES) == 1 or (where.devices == 1 and not subject.is_on(PROCESSES))
    if offload is not None and needed <= free:
        yield found("moderate", offload, case="offloads", needed_gib=needed, free_gib=free)
    elif asked is not None and alone and offload is None:
        yield found("low", asked, subject.settings.get(PROCESSES))
