"""Evaluation or checkpoints that stand after the loop over epochs, instead of in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import block_of, indent, indented
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.steps import interval
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEEPING = ("save", "checkpoint", "valid", "eval")            # what functions that evaluate or save are called


class OutsideTheEpochLoop(Rule):
    name = "outside_the_epoch_loop"
    rests_on = "features: 1.3 (the indentation bug of document 003)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        for loop in _epoch_loops(script) if script is not None else ():
            after = _following(script, loop) if script is not None else []
            late = [node for node in after if script is not None and _belongs_inside(script, node, loop)]
            if script is None or not late:
                continue
            between = after[after.index(late[0]):after.index(late[-1]) + 1]
            deeper = indent(script, loop.body[0])[len(indent(script, late[0])):]
            yield cls.found(
                "critical", "evaluation and checkpoints come only after the last epoch",
                f"{_names(script, late)} {'uses' if len(late) == 1 else 'use'} {script.words(loop.target)} after its "
                "loop, and so only once, at the end. A run that stops before has saved nothing, and nobody sees it overfit",
                *(script.evidence(_first_line(node)) for node in late), script.evidence(loop.target), expected=NO_SPEED,
                risk=Risk("none", "none", "low"),
                cure=Cure("Move them into the loop over epochs", indented(script, between, deeper)))


def _epoch_loops(script: Script) -> Iterator[ast.For]:
    """Loops by a counter, around the training loop or around a call of the function that has it."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and any(
                inner in script.training_loops for statement in node.body for inner in (statement, *script.reached(statement))):
            yield node


def _following(script: Script, loop: ast.For) -> list[ast.stmt]:
    block = block_of(script, loop)
    return block[block.index(loop) + 1:]


def _belongs_inside(script: Script, node: ast.stmt, loop: ast.For) -> bool:
    """Whether a statement evaluates or saves by the epoch's number: every so many, or as nothing in the loop does."""
    counter = loop.target.id if isinstance(loop.target, ast.Name) else ""
    if not any(isinstance(item, ast.Name) and item.id == counter for item in ast.walk(node)) or not _keeps(script, [node]):
        return False
    counted = any(isinstance(item, ast.If) and interval(item.test) is not None for item in ast.walk(node))
    return counted or not _keeps(script, loop.body)


def _keeps(script: Script, body: list[ast.stmt]) -> bool:
    return any(isinstance(item, ast.Call) and any(word in script.name(item.func).rpartition(".")[2].lower() for word in KEEPING)
               and script.name(item.func) != ".eval" for statement in body for item in (statement, *script.reached(statement)))


def _names(script: Script, late: list[ast.stmt]) -> str:
    return " and ".join(f"line {node.lineno}" for node in late[:3])


def _first_line(node: ast.stmt) -> ast.AST:
    return node.test if isinstance(node, ast.If) else node
