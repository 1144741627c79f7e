"""fp16 autocast without loss scaling."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class Fp16WithoutScaler(Rule):
    name = "fp16_without_scaler"
    rests_on = "documentation: torch.amp (gradients of fp16 below 6e-8 are zero; GradScaler prevents it)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script, fp16 = subject.script, subject.settings.get("training.fp16")
        if script is None or fp16 is None or fp16.value is not True or subject.framework != "pytorch":
            return
        if "autocast" not in fp16.spelled or not training_steps(script) or "GradScaler" in script.text:
            return
        yield cls.found(
            "critical", "fp16 gradients without loss scaling", "autocast computes in fp16, whose smallest number is 6e-8; "
            "without a GradScaler smaller gradients are zero, and weights that need them are not trained", fp16,
            *(script.evidence(call.node) for call in training_steps(script)[0].backward[:1]), expected=NO_SPEED,
            risk=Risk("low", "low", "low"),
            cure=Cure("Compute in bf16 where the device has it (compute capability 8.0 or newer), else add a GradScaler"))
