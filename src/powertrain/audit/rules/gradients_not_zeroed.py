"""Gradients that add up over the whole run, because nothing sets them back."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.code_editing import with_line
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

OTHERS = (".backward_step", "deepspeed.initialize", "lightning.Fabric", "lightning.fabric.Fabric")   # these zero by themselves


class GradientsNotZeroed(Rule):
    name = "gradients_not_zeroed"
    rests_on = "documentation: torch.Tensor.backward (accumulates into .grad)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or script.has_call(*OTHERS) or script.has_call(".zero_grad") or ".grad = None" in script.text:
            return
        for step in training_steps(script):
            if step.backward and step.optimizer_steps:
                last = step.optimizer_steps[-1]
                statement = script.statement(last.node)
                owner = script.words(last.node.args[0] if step.is_scaler(last.owner or last.node) and last.node.args
                                     else last.owner or last.node)
                yield cls.found(
                    "critical", "gradients are never set back", "backward() adds to what is there, so every step moves by the "
                    "sum of all gradients since the beginning", script.evidence(last.node), expected=NO_SPEED,
                    risk=Risk("low", "none", "low"),
                    cure=Cure("Zero the gradients after each optimizer step",
                              with_line(script, statement, f"{owner}.zero_grad(set_to_none=True)", after=True)))
                return
