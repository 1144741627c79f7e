"""Rules on number formats: bf16, fp16 and its loss scaling, TF32, and the type of the trained weights."""

from __future__ import annotations

import ast

from powertrain.audit.edits import added, removed, renamed, set_to, with_line
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import Script
from powertrain.audit.steps import Step, training_steps
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.cost.precision import GPU_SINCE, bf16_gain, bf16_pays, fp16_pays, unit_of
from powertrain.records.findings import UNMEASURED, Evidence, Expected

FAST_PASCAL = (6, 0)         # P100: twice as many fp16 as fp32 operations; the other Pascals have 1 for each 64
FP16, BF16, TF32, MIXED = "training.fp16", "training.bf16", "training.tf32", "accelerate.mixed_precision"
BESIDE = ("training.per_device_train_batch_size", "training.learning_rate", "training.num_train_epochs", "training.output_dir")


def asked_for(subject: Subject, key: str) -> Evidence:
    """Return the setting that asks for a precision: accelerate's, or the trainer's own."""
    return subject.seen(MIXED if MIXED in subject.settings else key)


@rule
def bf16_without_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for bf16 on hardware that has no bf16 units."""
    hardware = where.hardware
    if hardware is None or hardware.device == "mps" or subject.products_dtype != "bf16":
        return
    asked = asked_for(subject, BF16)
    if unit_of(hardware, "bf16") is None:
        yield found("critical", asked, edits=set_to(subject, BF16, False), case="GPU" if hardware.device == "cuda" else "",
                    name=hardware.name, capability=hardware.compute_capability, since=GPU_SINCE["bf16"])
    elif hardware.device == "cpu" and subject.framework in TRAINERS and not subject.is_on("training.use_cpu"):
        yield found("critical", asked, case="use_cpu", name=hardware.name)


@rule
def both_half_precisions(subject: Subject, where: Circumstances) -> Findings:
    """fp16 and bf16 are both on."""
    if subject.on(FP16) and subject.on(BF16):
        both = subject.settings[FP16], subject.settings[BF16]
        if subject.framework == "axolotl":       # core/builders/base.py: fp16 is passed on only where bf16 is off
            yield found("low", *both, edits=removed(subject, FP16), case="axolotl")
        else:
            yield found("critical", *both, edits=set_to(subject, FP16, False))


@rule
def fp16_on_bf16_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp16, with loss scaling, on hardware that has bf16."""
    unit = unit_of(where.hardware, "bf16") if where.hardware is not None and subject.products_dtype == "fp16" else None
    if unit is not None:
        both = (*set_to(subject, FP16, False), *set_to(subject, BF16, True))
        yield found("moderate", subject.seen(FP16 if subject.on(FP16) else MIXED), unit=unit,
                    edits=both if BF16 in subject.settings else renamed(subject, FP16, "bf16"))


@rule
def fp16_weights_unscaled(subject: Subject, where: Circumstances) -> Findings:
    """All weights are fp16 and trained under a gradient scaler, which refuses fp16 gradients."""
    if (subject.weights_dtype, subject.products_dtype) == ("fp16", "fp16") and subject.method == "full":
        yield found("critical", subject.settings["model.dtype"], subject.settings.get(FP16))


@code_rule
def fp16_without_scaler(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The training loop computes in fp16 without loss scaling."""
    if subject.value(FP16) is not True or subject.framework != "pytorch" or script.says("caler"):
        return
    kept = any(isinstance(script.statement(call), ast.Assign) for call in script.calls(".autocast", "autocast"))
    for step in training_steps(script) if "autocast" in subject.settings[FP16].spelled else ():
        if kept or any(not call.inner_loop for call in step.named(".autocast", "autocast")):
            yield found("critical", subject.settings[FP16], *(script.evidence(call.node) for call in step.backward[:1]))
            return


@rule
def fp16_without_tensor_cores(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp16 on a GPU whose fp16 is slower than its fp32."""
    hardware = where.hardware
    capability = hardware.compute_capability if hardware is not None else None
    if hardware is not None and capability is not None and subject.products_dtype == "fp16" and \
            capability < GPU_SINCE["fp16"] and capability != FAST_PASCAL:
        yield found("moderate", asked_for(subject, FP16), edits=set_to(subject, FP16, False), name=hardware.name,
                    capability=capability, since=GPU_SINCE["fp16"])


@rule
def fp32_on_half_hardware(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in fp32 on hardware with bf16 or fp16 units."""
    hardware = where.hardware
    if hardware is None or subject.products_dtype != "fp32" or subject.weights_dtype in ("bf16", "fp16"):
        return
    if not bf16_pays(hardware) and not fp16_pays(hardware):
        return
    type_ = "bf16" if bf16_pays(hardware) else "fp16"
    gain = bf16_gain(hardware) if type_ == "bf16" else None
    expected = UNMEASURED if gain is None else Expected(
        f"at most {gain:.1f} times as fast", "formula: this machine's measured GEMM peaks, bf16 over fp32", (1.0, gain))
    trainer = subject.framework in TRAINERS
    key = f"training.{type_}" if trainer else MIXED
    edits = set_to(subject, key, True if trainer else type_) or (
        added(subject, BESIDE, type_, True) if trainer and key not in subject.settings else ())
    yield found("moderate", subject.seen(key), edits=edits, expected=expected, type=type_,
                unit=unit_of(hardware, "bf16") if type_ == "bf16" else f"{hardware.name} has fp16 tensor cores")


@rule
def half_weights_trained(subject: Subject, where: Circumstances) -> Findings:
    """All weights are trained in bf16 or fp16, which rounds small updates away."""
    dtype = subject.weights_dtype
    if dtype in ("bf16", "fp16") and subject.method == "full":
        rate = subject.number("training.learning_rate") or None
        yield found("moderate", subject.settings["model.dtype"], type=dtype, rate=rate if dtype == "bf16" else None,
                    weight=rate * 512 if rate else None)


@rule
def tf32_without_effect(subject: Subject, where: Circumstances) -> Findings:
    """TF32 is on, but nothing is computed in fp32 or the hardware has no TF32."""
    if not subject.on(TF32):
        return
    dtype, hardware, edits = subject.products_dtype, where.hardware, removed(subject, TF32)
    if hardware is not None and unit_of(hardware, "tf32") is None:
        yield found("critical" if subject.framework in TRAINERS else "low", subject.settings[TF32], edits=edits,
                    case="hardware", name=hardware.name)
    elif dtype in ("bf16", "fp16"):
        yield found("low", subject.settings[TF32], edits=edits, type=dtype)


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
            yield found("critical", script.evidence(clip.node), script.evidence(scaled.node), unscale=unscale,
                        edits=with_line(script, script.statement(clip.node), unscale))


@code_rule
def scaler_half_used(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A GradScaler lacks one of its parts: scaling, step, update or autocast."""
    steps = training_steps(script)
    made = next(script.calls("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"), None) if steps else None
    missing = _missing_of_scaler(script, steps) if made is not None else ""
    if made is not None and missing:
        yield found("moderate", script.evidence(made), *(script.evidence(call.node) for call in steps[0].backward[:1]),
                    case=missing)


def _missing_of_scaler(script: Script, steps: list[Step]) -> str:
    """Return which part of the scaler's use is missing; "" if none is."""
    calls = [(step, call) for step in steps for call in step.calls]
    used = {call.method for step, call in calls if call.owner is not None and step.is_scaler(call.owner)}
    if not script.says("autocast"):
        return "autocast"
    if "scale" not in used and "step" in used:
        return "scale"
    if "scale" in used and "step" not in used and any(call.method == "step" for _, call in calls):
        return "step"
    return "update" if "step" in used and "update" not in used else ""
