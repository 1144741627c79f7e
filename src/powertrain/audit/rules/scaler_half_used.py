"""A GradScaler of which one half is missing: no scaling, no update, or no autocast."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class ScalerHalfUsed(Rule):
    name = "scaler_half_used"
    rests_on = "documentation: torch.amp.GradScaler (scale, step, update belong together)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        made = next(script.calls("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"), None) if script else None
        if script is None or made is None or not training_steps(script):
            return
        missing = _missing(script)
        if missing:
            yield cls.found(
                "moderate", "the GradScaler is used by halves", missing, script.evidence(made),
                *(script.evidence(call.node) for step in training_steps(script)[:1] for call in step.backward[:1]),
                expected=NO_SPEED, risk=Risk("low", "none", "low"),
                cure=Cure("scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update(), under autocast; or bf16, "
                "which needs none of it"))


def _missing(script: Script) -> str:
    calls = [call for step in training_steps(script) for call in step.calls]
    scaler = {call.method for step in training_steps(script) for call in step.calls
              if call.owner is not None and step.is_scaler(call.owner)}
    if not script.has_call(".autocast", ".autocast_mode", "autocast"):
        return ("Nothing computes under autocast: the passes are fp32, and scaling their gradients is work without a gain. Who "
                "believes this run to be mixed precision pays fp32's price")
    if "scale" not in scaler and "step" in scaler:
        return "The loss is not scaled before backward(), so small fp16 gradients become zero, and the scaler divides the "
        "others"
    if "scale" in scaler and "step" not in scaler and any(call.method == "step" for call in calls):
        return "The loss is scaled, but the optimizer steps without the scaler: by gradients 65536 times too large"
    if "step" in scaler and "update" not in scaler:
        return "scaler.update() is missing: after the first overflow each step is skipped, or the scale never grows"
    return ""
