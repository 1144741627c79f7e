"""An evaluation that stores what only a backward pass needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_line
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.script import Loop, Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

WITHOUT = ("torch.no_grad", "torch.inference_mode", "torch.set_grad_enabled", "torch.autograd.no_grad")


class EvaluationKeepsGradients(Rule):
    name = "evaluation_keeps_gradients"
    rests_on = "documentation: torch.inference_mode; fact: without it every activation is kept until the loss is dropped"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        for call in script.calls(".eval") if script is not None else ():
            if script is None or call.args or call.keywords:
                continue
            loop = _evaluation_after(script, call)
            if loop is None or _is_without_gradients(script, loop):
                continue
            whole = script.function(loop)
            edits = with_line(script, whole, "@torch.inference_mode()") if (
                whole is not None and not any(script.is_within(other, whole) for other in script.training_loops)
                and script.imported.get("torch") == "torch") else ()
            yield cls.found(
                "moderate", "the evaluation keeps everything for a backward pass", "Without torch.no_grad() each batch's "
                "activations are stored as for training: the evaluation takes training's memory, and time to write it",
                script.evidence(call), script.evidence(loop.iter if isinstance(loop, ast.For) else loop), expected=UNMEASURED,
                cure=Cure("Evaluate under torch.inference_mode()", edits))
            return


def _evaluation_after(script: Script, call: ast.Call) -> Loop | None:
    """The loop without a backward pass, and with a model's call, that follows `eval()` in its function."""
    function = script.function(call) or script.tree
    owner = script.words(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    for node in ast.walk(function):
        if isinstance(node, Loop) and node.lineno > call.lineno and not any(
                isinstance(item, ast.Attribute) and item.attr == "backward" for item in ast.walk(node)) and any(
                isinstance(item, ast.Call) and script.words(item.func) == owner for item in ast.walk(node)):
            return node
    return None


def _is_without_gradients(script: Script, loop: Loop) -> bool:
    function = script.function(loop)
    decorated = function is not None and any(script.name(item) in WITHOUT for item in function.decorator_list)
    around = [item for outer in script.ancestors(loop) if isinstance(outer, ast.With) for item in outer.items]
    within = [item for inner in ast.walk(loop) if isinstance(inner, ast.With) for item in inner.items]
    callers = [item for call in ast.walk(script.tree) if isinstance(call, ast.Call) and function is not None
               and script.called(call) is function for outer in script.ancestors(call) if isinstance(outer, ast.With)
               for item in outer.items]
    return decorated or any(script.name(item.context_expr) in WITHOUT for item in (*around, *within, *callers)) or (
        script.has_call("torch.set_grad_enabled"))
