"""A schedule prepared by Accelerate, which advances once for every process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Script
from powertrain.audit.steps import SCHEDULERS
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class SchedulerEachProcess(Rule):
    name = "scheduler_each_process"
    rests_on = "features: F17; documentation: accelerate/scheduler.py (a prepared scheduler steps num_processes times a step)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or subject.framework != "accelerate" or _is_switched_off(script):
            return
        single = where.hardware is not None and where.hardware.devices == 1
        for call in script.calls(".prepare"):
            for given in call.args:
                prepared = isinstance(given, ast.Name) and script.is_made_by(given, *SCHEDULERS)
                made = _schedule(script, given) if isinstance(given, ast.Name) and prepared else None
                if made is None or "num_processes" in _length(script, made) or _counted_before(script, made, call):
                    continue
                yield cls.found(
                    "low" if single else "critical", "the schedule is over too early on several processes",
                    f"accelerator.prepare makes {script.words(given)} step once for each process at every optimizer step, "
                    "and its length does not count them: on N processes the learning rate reaches its end after 1/N of the run"
                    + ("; one device is here, where N is 1" if single else ""),
                    script.evidence(made), script.evidence(call), expected=NO_SPEED, risk=Risk("none", "low", "low"),
                    cure=Cure("Do not prepare it, or make its length (and warm-up) times accelerator.num_processes"))
                return


def _schedule(script: Script, given: ast.Name) -> ast.Call | None:
    """The call that made a scheduler."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and any(
                isinstance(target, ast.Name) and target.id == given.id for target in node.targets):
            return node.value
    return None


def _length(script: Script, made: ast.Call) -> str:
    """The words that a schedule's length comes from, through one variable."""
    words = script.words(made)
    names = {node.id for node in ast.walk(made) if isinstance(node, ast.Name)}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and any(isinstance(item, ast.Name) and item.id in names for item in node.targets):
            words += " " + script.words(node.value)
    return words


def _counted_before(script: Script, made: ast.Call, prepare: ast.Call) -> bool:
    """Whether its length is that of a loader which is prepared later: in all processes together it has as many batches."""
    prepared = {given.id for given in prepare.args if isinstance(given, ast.Name)}
    waiting: list[ast.AST] = [made]
    seen: set[str] = set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Call) and script.name(node.func) == "len" and node.lineno < prepare.lineno and any(
                    isinstance(item, ast.Name) and item.id in prepared for item in node.args):
                return True
            if isinstance(node, ast.Name) and node.id not in seen and node.id not in prepared:
                seen.add(node.id)
                waiting += [other.value for other in ast.walk(script.tree) if isinstance(other, ast.Assign) and any(
                    isinstance(target, ast.Name) and target.id == node.id for target in other.targets)]
    return False


def _is_switched_off(script: Script) -> bool:
    return any(keyword.arg in ("step_scheduler_with_optimizer", "split_batches")
               for call in script.calls("accelerate.Accelerator") for keyword in call.keywords)
