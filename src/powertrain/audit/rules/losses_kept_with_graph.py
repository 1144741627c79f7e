"""Losses kept together with the graph that computed them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_text
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class LossesKeptWithGraph(Rule):
    name = "losses_kept_with_graph"
    rests_on = "features: F14 (a leak is a tensor that is kept); documentation: torch FAQ, \"my model reports out of memory\""

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        for loop in script.training_loops if script else ():
            names = set(_backward_of(loop))
            for node in ast.walk(loop):
                kept = _kept(node)
                if script is not None and isinstance(kept, ast.Name) and kept.id in names:
                    yield cls.found(
                        "moderate", "losses are kept with their graphs", f"{kept.id} still refers to everything that computed "
                        "it; each one kept holds on to its graph, and memory grows with every step",
                        script.evidence(node), expected=NO_SPEED, risk=Risk("none", "none", "low"),
                        cure=Cure("Keep its value only: `loss.detach()`", with_text(script, kept, f"{kept.id}.detach()")))
                    return


def _backward_of(loop: ast.AST) -> Iterator[str]:
    """The variables that `.backward()` is called on."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            for item in (node.func.value, *node.args):         # `scaler.scale(loss).backward()`, `(loss / 4).backward()` too
                yield from (name.id for name in ast.walk(item) if isinstance(name, ast.Name))


def _kept(node: ast.AST) -> ast.expr | None:
    """What is added to a sum or a list."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
        return node.args[0]
    return None
