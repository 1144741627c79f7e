"""Gradients clipped after the optimizer has used them, or before they exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_line, without
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.steps import StepCall, training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Edit, Finding, Risk


class ClipWithoutEffect(Rule):
    name = "clip_without_effect"
    rests_on = "documentation: torch.nn.utils.clip_grad_norm_ (changes .grad in place: after backward, before the step)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in training_steps(subject.script) if subject.script else ():
            script, clips, stepped = step.script, step.clipping, step.optimizer_steps
            if not clips or not stepped or not step.backward:
                continue
            last, passed = min(call.order for call in stepped), max(call.order for call in step.backward)
            if all(passed < clip.order < last for clip in clips):
                continue
            clip = next(clip for clip in clips if not passed < clip.order < last)
            early = clip.order < passed
            yield cls.found(
                "critical", "gradient clipping has no effect", "The gradients are clipped " + (
                    "before backward() has made them" if early else "after the optimizer has used them, and are then thrown "
                    "away")
                + ": a spike of the loss goes straight into the weights", script.evidence(clip.node),
                script.evidence(stepped[0].node), expected=NO_SPEED, risk=Risk("none", "low", "low"),
                cure=Cure("Clip between backward() and the optimizer's step", _moved(script, clip, stepped[0])))


def _moved(script: Script, clip: StepCall, stepped: StepCall) -> tuple[Edit, ...]:
    statement, target = script.statement(clip.node), script.statement(stepped.node)
    if not isinstance(statement, ast.Expr):
        return ()
    edits = (*without(script, statement), *with_line(script, target, script.words(statement)))
    return edits if len(edits) == 2 else ()
