"""The device waited for at every step, to read a number that nobody looks at."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_text
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.steps import step_code
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Edit, Finding

WAITING = (".item", ".tolist", ".numpy")


class ItemEachStep(Rule):
    name = "item_each_step"
    rests_on = "features: F16 (`.item()` waits for the device); documentation: torch.Tensor.item"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in step_code(subject.script) if subject.script else ():
            waits = [call for call in step.named(*WAITING) if call.every_step]
            waits += [call for call in step.named("float") if call.every_step and _is_loss(call.node)]
            if not waits:
                continue
            alone = where.hardware is not None and where.hardware.device == "cpu"
            edits = tuple(edit for call in waits for edit in _kept_on_device(step.script, call.node))
            yield cls.found(
                "low" if alone else "moderate", "the loop waits for the device at every step",
                f"{step.script.words(waits[0].node)} copies a number from the device, so Python stands still until all queued "
                "work is done and the device then has nothing queued" + ("; on a CPU there is no queue, and little is lost"
                                                                         if alone else ""),
                *(step.script.evidence(call.node) for call in waits[:4]), expected=UNMEASURED,
                cure=Cure("Add losses up on the device (`total += loss.detach()`), and read them every so many steps", edits))


def _is_loss(node: ast.Call) -> bool:
    return len(node.args) == 1 and isinstance(node.args[0], ast.Name) and "loss" in node.args[0].id


def _kept_on_device(script: Script, node: ast.Call) -> tuple[Edit, ...]:
    """`total += loss.item()` as `total += loss.detach()`; elsewhere a number may be needed."""
    around = script.parents[node]
    if isinstance(around, ast.AugAssign) and isinstance(node.func, ast.Attribute) and not node.args:
        return with_text(script, node, f"{script.words(node.func.value)}.detach()")
    return ()
