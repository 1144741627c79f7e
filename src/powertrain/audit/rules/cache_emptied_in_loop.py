"""The allocator's cache emptied, or garbage collected, in the training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import without
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.steps import interval, is_rare, step_code
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

EMPTYING = ("torch.cuda.empty_cache", "torch.mps.empty_cache", "torch.xpu.empty_cache", "gc.collect", ".empty_cache")


class CacheEmptiedInLoop(Rule):
    name = "cache_emptied_in_loop"
    rests_on = "features: X3 (empty_cache gives PyTorch no memory that it did not have); documentation: torch.cuda.empty_cache"
    gives_way_to = frozenset({"cache_emptied"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None:
            return
        found = [call for step in step_code(script) for call in step.named(*EMPTYING)]
        often = any(not is_rare(call) for call in found)
        nodes = [call.node for call in found] or [node for node in script.calls(*EMPTYING) if _counts_steps(script, node)]
        if not nodes:
            return
        statements = [script.statement(node) for node in nodes]
        edits = without(script, *dict.fromkeys(statements)) if all(_is_whole(statement) for statement in statements) else ()
        yield cls.found(
            "moderate" if often else "low", "the allocator's cache is emptied " + ("at every step" if often else "in the loop"),
            "Emptying it waits for the device and gives its memory back, which the next step has to ask for again. Memory that "
            "is in use stays in use: a leak is a tensor that is kept, and an out-of-memory error is not cured by it",
            *(script.evidence(node) for node in nodes[:4]), expected=UNMEASURED,
            cure=Cure("Take it out; against fragmentation set PYTORCH_ALLOC_CONF=expandable_segments:True", edits))


def _counts_steps(script: Script, node: ast.AST) -> bool:
    """Under an `if` that counts steps, in a snippet whose loop is somewhere else."""
    return any(interval(condition.test) is not None and "step" in script.words(condition.test).lower()
               for condition in script.conditions(node))


def _is_whole(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr)
