"""model.eval() without a way back: dropout stays off for the rest of the training."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_line
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Loop, Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class EvaluationModeLeftOn(Rule):
    name = "evaluation_mode_left_on"
    rests_on = "documentation: torch.nn.Module.eval (holds until train() is called)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None:
            return
        for loop in script.training_loops:
            for around in _around(script, loop):
                switched = _method(script, around, "eval")
                if not switched or _method(script, around, "train"):
                    continue
                first = around.body[0]
                model = script.words(switched[0].func.value) if isinstance(switched[0].func, ast.Attribute) else "model"
                inside_function = script.function(switched[0]) is not script.function(around)
                edits = () if inside_function or around is loop else with_line(script, first, f"{model}.train()")
                yield cls.found(
                    "moderate", "after the first evaluation the model trains in evaluation mode", "eval() switches dropout off "
                    "until train() is called, and no train() is reached from the loop: regularisation ends with the first "
                    "evaluation", script.evidence(switched[0]), expected=NO_SPEED, risk=Risk("none", "low", "low"),
                    cure=Cure("Call model.train() at the beginning of every epoch, and after an evaluation within one", edits))
                return


def _around(script: Script, loop: Loop) -> list[Loop]:
    """The training loop, the loops around it, and around the calls of the function that it stands in."""
    found = [loop, *script.loops(loop)]
    function = script.function(loop)
    for node in ast.walk(script.tree):
        if function is not None and isinstance(node, ast.Call) and script.called(node) is function:
            found += [outer for outer in script.loops(node) if outer not in found]
    return found


def _method(script: Script, loop: Loop, name: str) -> list[ast.Call]:
    """Calls of `.eval()` or `.train()`, without arguments or with True, that the loop reaches."""
    return [node for statement in loop.body for node in (statement, *script.reached(statement))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
            and len(node.args) <= (name == "train") and not node.keywords]
