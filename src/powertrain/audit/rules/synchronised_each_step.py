"""The device synchronised at every step, as for a measurement."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import without
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.steps import step_code
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding


class SynchronisedEachStep(Rule):
    name = "synchronised_each_step"
    rests_on = "documentation: torch.cuda.synchronize (waits for all kernels in all streams)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in step_code(subject.script) if subject.script else ():
            waits = [call for call in step.named("torch.cuda.synchronize", "torch.mps.synchronize") if call.every_step]
            if not waits:
                continue
            script = step.script
            statements = [script.statement(call.node) for call in waits]
            whole = all(isinstance(statement, ast.Expr) for statement in statements)
            yield cls.found(
                "moderate", "the device is synchronised at every step", "Python prepares no step while it waits, so the device "
                "idles at the beginning of each; a measurement needs it, training does not",
                *(script.evidence(call.node) for call in waits), expected=UNMEASURED,
                cure=Cure("Synchronise only around what is timed", without(script, *statements) if whole else ()))
