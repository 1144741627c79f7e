"""Gradients of several micro-batches summed where their mean was meant."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_text
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import Step, training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class AccumulationNotDivided(Rule):
    name = "accumulation_not_divided"
    rests_on = "fact: backward() sums over micro-batches, and the loss of each is a mean of its own"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in training_steps(subject.script) if subject.script else ():
            script, accumulation = step.script, step.accumulation
            if accumulation is None or step.accumulates_by_accelerate or _divides(step):
                continue
            call, every = accumulation
            passed = step.backward[0].node
            edits = with_text(script, passed.func.value, f"({script.words(passed.func.value)} / {script.words(every)})") if (
                isinstance(passed.func, ast.Attribute) and isinstance(passed.func.value, ast.Name) and not passed.args) else ()
            yield cls.found(
                "moderate", "accumulated gradients are summed, not averaged", f"The gradient of a step is that of "
                f"{script.words(every)} micro-batches added up: so many times as large as the batch's. Clipping then cuts it "
                "more often than was meant, and SGD's step is so many times as long",
                script.evidence(passed), script.evidence(call.node), expected=NO_SPEED, risk=Risk("none", "low", "low"),
                cure=Cure(f"Divide the loss by {script.words(every)} before backward()", edits))


def _divides(step: Step) -> bool:
    """Whether anything of the step divides: a loss by the number of passes or by tokens, gradients afterwards."""
    return any((isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)) or
               (isinstance(node, ast.Call) and step.script.name(node).endswith((".div_", ".div", ".mul_")))
               for statement in step.node.body for node in (statement, *step.script.reached(statement)))
