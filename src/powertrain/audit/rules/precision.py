"""Rules on number formats: bf16, fp16 and its loss scaling, TF32, and the type of the trained weights."""

from __future__ import annotations

import ast

from powertrain.audit.code_editing import with_line
from powertrain.audit.editing import added, removed, renamed, set_to
from powertrain.audit.resolved import TRAINERS, dtype_named, is_on, method, number, products_dtype, seen, value
from powertrain.audit.rules.base import STARTS, UNCHANGED, Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.steps import Step, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.cost.precision import BF16_SINCE, FP16_SINCE, bf16_gain, bf16_pays, bf16_unit, fp16_pays, has_tf32
from powertrain.records.findings import UNMEASURED, Evidence, Expected, rule

FAST_PASCAL = (6, 0)         # P100: twice as many fp16 as fp32 operations; the other Pascals have 1 for each 64
BESIDE = ("training.per_device_train_batch_size", "training.learning_rate", "training.num_train_epochs", "training.output_dir")


def asked_for(subject: Subject, key: str) -> Evidence:
    """Return the setting that asks for a precision: accelerate's, or the trainer's own."""
    mixed = "accelerate.mixed_precision"
    return seen(subject, mixed if mixed in subject.settings else key)


@rule("technique: bf16; features: F18 (torch says that bf16 is supported where it is emulated)",
      gives_way_to=("both_half_precisions",))
def bf16_without_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for bf16 on hardware that has no bf16 units."""
    hardware = where.hardware
    if hardware is None or hardware.device == "mps" or products_dtype(subject) != "bf16":
        return
    asked = asked_for(subject, "training.bf16")
    if bf16_unit(hardware) is None:
        on_gpu = hardware.device == "cuda"
        lacks = f"{hardware.name} has compute capability {hardware.compute_capability}, and bf16 begins at {BF16_SINCE}" \
            if on_gpu else f"{hardware.name} has neither AMX nor AVX512-BF16"
        yield found("critical", f"{lacks}: either torch emulates bf16, or the trainer refuses to start", asked,
                    expected=UNMEASURED, breaking="low", accuracy="low",
                    cure=f"Compute in {'fp16' if on_gpu else 'fp32'} on this machine",
                    edits=set_to(subject, "training.bf16", False), words=("techniques.bf16=off",),
                    title="bf16 on hardware without bf16")
    elif hardware.device == "cpu" and subject.framework in TRAINERS and not is_on(subject, "training.use_cpu"):
        yield found("critical", f"{hardware.name} multiplies bf16, but without a GPU TrainingArguments raises \"Your setup "
                    "doesn't support bf16/gpu. You need to assign use_cpu\"", asked,
                    expected=Expected("the run starts", "documentation: TrainingArguments._validate_args"),
                    cure="Set use_cpu=True if the run shall use this machine's CPU", title="bf16 on a CPU without use_cpu")


@rule("documentation: TrainingArguments._validate_args (transformers 5.23)")
def both_half_precisions(subject: Subject, where: Circumstances) -> Findings:
    """fp16 and bf16 are both on."""
    if not (subject.on("training.fp16") and subject.on("training.bf16")):
        return
    both = subject.settings["training.fp16"], subject.settings["training.bf16"]
    if subject.framework == "axolotl":       # core/builders/base.py: fp16 is passed on only where bf16 is off
        yield found("low", "Axolotl uses fp16 only if bf16 is off", *both, expected=UNCHANGED, cure="Remove fp16",
                    edits=removed(subject, "training.fp16"), title="fp16 beside bf16 does nothing")
    else:
        yield found("critical",
                    "A run computes in one of the two types; the trainer raises \"At most one of fp16 and bf16 can be True\"",
                    *both, expected=STARTS, cure="Keep bf16 if the hardware has it, else fp16",
                    edits=set_to(subject, "training.fp16", False), title="fp16 and bf16 together")


@rule("technique: bf16; features: X6 (equal tensor-core peaks; bf16 needs no loss scaling)",
      gives_way_to=("both_half_precisions", "fp16_weights_unscaled"))
def fp16_on_bf16_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp16, with loss scaling, on hardware that has bf16."""
    unit = bf16_unit(where.hardware) if where.hardware is not None and products_dtype(subject) == "fp16" else None
    if unit is None:
        return
    edits = renamed(subject, "training.fp16", "bf16")
    if "training.bf16" in subject.settings:
        edits = (*set_to(subject, "training.fp16", False), *set_to(subject, "training.bf16", True))
    yield found("moderate", f"bf16 is as fast here ({unit}) and has the range of fp32. fp16 overflows above 65,504, so the "
                "loss is scaled, and steps whose gradients overflow are skipped",
                seen(subject, "training.fp16" if subject.on("training.fp16") else "accelerate.mixed_precision"),
                expected=Expected("no skipped steps; about as fast", "none"), accuracy="low", cure="Compute in bf16",
                edits=edits, words=("techniques.bf16=on",))


@rule("fact: torch.amp.GradScaler raises \"Attempting to unscale FP16 gradients\"")
def fp16_weights_unscaled(subject: Subject, where: Circumstances) -> Findings:
    """All weights are fp16 and trained under a gradient scaler, which refuses fp16 gradients."""
    types = dtype_named(value(subject, "model.dtype")), products_dtype(subject)
    if types == ("fp16", "fp16") and method(subject) == "full":
        yield found("critical", "All weights are loaded in fp16 and trained with fp16=True. The gradient scaler needs fp32 "
                    "weights: the first step ends in \"Attempting to unscale FP16 gradients\"", subject.settings["model.dtype"],
                    subject.settings.get("training.fp16"), expected=STARTS,
                    cure="Load the weights in fp32; autocast computes in fp16")


@rule("documentation: torch.amp (gradients of fp16 below 6e-8 are zero; GradScaler prevents it)")
@of_script
def fp16_without_scaler(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The training loop computes in fp16 without loss scaling."""
    fp16 = subject.settings.get("training.fp16")
    if fp16 is None or fp16.value is not True or subject.framework != "pytorch" or script.says("caler"):
        return
    for step in training_steps(script):
        if "autocast" in fp16.spelled and _computes_under_autocast(script, step):
            yield found("critical", "Autocast computes in fp16, whose smallest number is 6e-8. Without a GradScaler smaller "
                        "gradients become zero, and their weights are not trained", fp16,
                        *(script.evidence(call.node) for call in step.backward[:1]), breaking="low", accuracy="low",
                        cure="Compute in bf16 if the device has it (compute capability 8.0 or newer), else add a GradScaler")
            return


def _computes_under_autocast(script: Script, step: Step) -> bool:
    """Whether autocast stands in the step itself, or is kept in a variable for it."""
    return any(not call.inner_loop for call in step.named(".autocast", "autocast")) or any(
        isinstance(script.statement(call), ast.Assign) for call in script.calls(".autocast", "autocast"))


@rule("technique: fp16; features: F22; documentation: CUDA's table of arithmetic throughputs",
      gives_way_to=("both_half_precisions",))
def fp16_without_tensor_cores(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp16 on a GPU whose fp16 is slower than its fp32."""
    hardware = where.hardware
    capability = hardware.compute_capability if hardware is not None else None
    if hardware is not None and capability is not None and products_dtype(subject) == "fp16" and \
            capability < FP16_SINCE and capability != FAST_PASCAL:
        yield found("moderate", f"{hardware.name} has compute capability {capability}: it has no tensor cores, which begin at "
                    f"{FP16_SINCE}, and few fp16 units. fp16 saves memory of activations, but matrix products may be slower "
                    "than in fp32", asked_for(subject, "training.fp16"), expected=UNMEASURED, breaking="low",
                    cure="Compute in fp32 if it fits, and measure both", edits=set_to(subject, "training.fp16", False),
                    words=("techniques.fp16=off",))


@rule("technique: bf16, fp16")
def fp32_on_half_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp32 on hardware with bf16 or fp16 units."""
    hardware, loaded = where.hardware, dtype_named(value(subject, "model.dtype"))
    if hardware is None or products_dtype(subject) != "fp32" or loaded in ("bf16", "fp16"):
        return
    if not bf16_pays(hardware) and not fp16_pays(hardware):
        return
    type_ = "bf16" if bf16_pays(hardware) else "fp16"
    gain = bf16_gain(hardware) if type_ == "bf16" else None
    expected = UNMEASURED if gain is None else Expected(
        f"at most {gain:.1f} times as fast", "formula: this machine's measured GEMM peaks, bf16 over fp32", (1.0, gain))
    trainer = subject.framework in TRAINERS
    key = f"training.{type_}" if trainer else "accelerate.mixed_precision"
    edits = set_to(subject, key, True if trainer else type_) or (
        added(subject, BESIDE, type_, True) if trainer and key not in subject.settings else ())
    unit = bf16_unit(hardware) if type_ == "bf16" else f"{hardware.name} has fp16 tensor cores"
    yield found("moderate", f"{unit}, but all matrix products are computed in fp32", seen(subject, key), expected=expected,
                accuracy="low", cure=f"Compute matrix products in {type_}; weights and optimizer stay fp32", edits=edits,
                words=(f"techniques.{type_}=on",), title=f"fp32 on hardware with {type_}")


@rule("fact: bf16 has 8 bits of mantissa, so a weight changes by 2^-9 of itself or not at all",
      gives_way_to=("fp16_weights_unscaled",))
def half_weights_trained(subject: Subject, where: Circumstances) -> Findings:
    """All weights are trained in bf16 or fp16, which rounds small updates away."""
    dtype = dtype_named(value(subject, "model.dtype"))
    if dtype not in ("bf16", "fp16") or method(subject) != "full":
        return
    rate = number(subject, "training.learning_rate")
    step = f". AdamW moves a weight by about the learning rate, {rate:g}: weights above {rate * 512:g} do not move" \
        if rate and dtype == "bf16" else ""
    yield found("moderate", f"Weights, updates and AdamW's moments are all {dtype}{step}", subject.settings["model.dtype"],
                breaking="low", words=("method=full",), cure="Load the weights in fp32 and let autocast compute in bf16; "
                "weights and moments then take 12 bytes more a weight", title=f"all weights are trained in {dtype}")


@rule("technique: tf32; features: F3 (it changes fp32 matrix products only)")
def tf32_without_effect(subject: Subject, where: Circumstances) -> Findings:
    """TF32 is on, but nothing is computed in fp32 or the hardware has no TF32."""
    if not subject.on("training.tf32"):
        return
    asked, dtype, edits = subject.settings["training.tf32"], products_dtype(subject), removed(subject, "training.tf32")
    if where.hardware is not None and not has_tf32(where.hardware):
        yield found("critical" if subject.framework in TRAINERS else "low", f"{where.hardware.name} has no TF32, which begins "
                    "with compute capability 8.0: TrainingArguments raises \"--tf32 requires Ampere\"", asked, expected=STARTS,
                    cure="Remove tf32", edits=edits, title="TF32 on hardware without TF32")
    elif dtype in ("bf16", "fp16"):
        yield found("low",
                    f"Autocast computes matrix products in {dtype}; hardly any fp32 product is left for TF32 to speed up",
                    asked, cure="Remove tf32", edits=edits,
                    expected=Expected("none: the documents' factor is that of one fp32 product", "none"),
                    title="TF32 under autocast changes nothing")


@rule("documentation: torch.amp examples, \"gradient clipping\" (unscale_ before clipping)")
@of_script
def clip_before_unscale(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are clipped while the GradScaler's factor is still in them."""
    for step in training_steps(script):
        scaled = [call for call in step.optimizer_steps if call.owner is not None and step.is_scaler(call.owner)]
        clip = next((clip for clip in step.clipping if not any(call.order < clip.order for call in step.unscaling)), None)
        if not scaled or clip is None:
            continue
        optimizer = script.words(scaled[0].node.args[0]) if scaled[0].node.args else "optimizer"
        scaler = script.words(scaled[0].owner or scaled[0].node)
        yield found("critical", "The GradScaler has multiplied the gradients by its factor, which begins at 65,536. Clipping "
                    "cuts every step to a tiny part of its gradient", script.evidence(clip.node),
                    script.evidence(scaled[0].node), accuracy="low",
                    cure=f"Call {scaler}.unscale_({optimizer}) before clipping",
                    edits=with_line(script, script.statement(clip.node), f"{scaler}.unscale_({optimizer})"))


@rule("documentation: torch.amp.GradScaler (scale, step, update belong together)")
@of_script
def scaler_half_used(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A GradScaler lacks one of its parts: scaling, step, update or autocast."""
    steps = training_steps(script)
    made = next(script.calls("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"), None) if steps else None
    missing = _missing_of_scaler(script, steps) if made is not None else ""
    if made is not None and missing:
        yield found("moderate", missing, script.evidence(made), *(script.evidence(call.node) for call in steps[0].backward[:1]),
                    breaking="low", cure="Use scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update() under "
                    "autocast; or compute in bf16, which needs no scaler")


def _missing_of_scaler(script: Script, steps: list[Step]) -> str:
    calls = [(step, call) for step in steps for call in step.calls]
    used = {call.method for step, call in calls if call.owner is not None and step.is_scaler(call.owner)}
    if not script.says("autocast"):
        return "Nothing computes under autocast: the passes are fp32, and scaling their gradients has no use"
    if "scale" not in used and "step" in used:
        return "The loss is not scaled before backward(), so small fp16 gradients become zero; the scaler divides the rest"
    if "scale" in used and "step" not in used and any(call.method == "step" for _, call in calls):
        return "The loss is scaled, but the optimizer steps without the scaler, by gradients that are 65,536 times too large"
    if "step" in used and "update" not in used:
        return "scaler.update() is missing: the scale never falls after an overflow and never grows"
    return ""
