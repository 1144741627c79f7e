"""Gradients zeroed before the optimizer has used them."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.code_editing import with_line, without
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import Step, StepCall, training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class GradientsClearedEarly(Rule):
    name = "gradients_cleared_early"
    rests_on = "documentation: torch.optim.Optimizer.zero_grad; fact: accumulation adds in .grad until the optimizer's step"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in training_steps(subject.script) if subject.script else ():
            if step.accumulates_by_accelerate or not step.backward:
                continue
            script, accumulation = step.script, step.accumulation
            each = [call for call in step.zeroing if call.every_step]
            if accumulation is not None and each:
                call, every = accumulation
                edits = (*without(script, script.statement(each[0].node)),
                         *with_line(script, script.statement(call.node), script.words(each[0].node), after=True))
                yield cls.found(
                    "critical", "gradients are zeroed at every micro-batch", f"The optimizer steps every {script.words(every)} "
                    "passes, but the gradients are zeroed at each: all but the last micro-batch are computed for nothing",
                    script.evidence(each[0].node), script.evidence(call.node), expected=NO_SPEED,
                    risk=Risk("low", "none", "low"),
                    cure=Cure("Zero them right after the optimizer's step, under the same condition",
                              edits if len(edits) == 2 else ()))
            elif step.optimizer_steps and (between := _between(step)) is not None:
                yield cls.found(
                    "critical", "gradients are zeroed before they are used", "Between backward() and the optimizer's step the "
                    "gradients are thrown away: nothing is trained", script.evidence(between.node),
                    script.evidence(step.optimizer_steps[0].node), expected=NO_SPEED, risk=Risk("low", "none", "low"),
                    cure=Cure("Zero them before backward(), or after the optimizer's step"))


def _between(step: Step) -> StepCall | None:
    """A zeroing after the last backward and before the first step of the optimizer, all of them unconditional."""
    passed = max((call.order for call in step.backward if call.every_step), default=None)
    stepped = min((call.order for call in step.optimizer_steps if call.every_step), default=None)
    if passed is None or stepped is None:
        return None
    return next((call for call in step.zeroing if call.every_step and passed < call.order < stepped), None)
