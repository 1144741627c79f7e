"""Checkpoints without what a run needs to go on: the optimizer, the schedule, the place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.script import Loop, Script
from powertrain.audit.steps import outermost
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

WHOLE = (".save_state", ".save_checkpoint", "torch.distributed.checkpoint.save")     # these save everything, or more
ALSO = {"schedule": ("sched",), "the scaler": ("scaler",), "the place in the run": ("epoch", "step", "iter")}


class CheckpointCannotResume(Rule):
    name = "checkpoint_cannot_resume"
    rests_on = ("documentation: torch tutorial \"saving a general checkpoint for resuming\"; features: 5.3 (work lost by the "
                "five systems)")

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or not script.training_loops or script.has_call(*WHOLE):
            return
        saves = [call for loop in script.training_loops for call in _saves(script, outermost(script, loop))]
        saved = " ".join(_contents(script, call) for call in saves).lower()
        if not saves:
            return
        if "optim" not in saved:
            yield cls.found(
                "moderate", "a run cannot go on from its checkpoints", "Only weights are saved. A run that starts from them "
                "begins with empty optimizer moments and at the beginning of its schedule and data: the loss jumps, and the "
                "result is "
                "another one", *(script.evidence(call) for call in saves[:3]), expected=NO_SPEED,
                risk=Risk("none", "none", "low"),
                cure=Cure("Save optimizer, scheduler, scaler, step and random states beside the weights, and load them all"))
            return
        used = " ".join(name.lower() for name in script.kinds)
        missing = [what for what, words in ALSO.items() if not any(word in saved for word in words)
                   and (what == "the place in the run" or any(word in used for word in words))]
        if missing:
            yield cls.found(
                "low", "checkpoints lack a part of the run's state", f"Not saved: {', '.join(missing)}. A resumed run goes on "
                "differently from one that was not stopped", *(script.evidence(call) for call in saves[:2]), expected=NO_SPEED,
                cure=Cure(f"Save {', '.join(missing)} too"))


def _saves(script: Script, loop: Loop) -> list[ast.Call]:
    return [node for statement in loop.body for node in (statement, *script.reached(statement))
            if isinstance(node, ast.Call) and (script.name(node.func) in ("torch.save", "safetensors.torch.save_file")
                                               or _saves_a_model(script, node))]


def _saves_a_model(script: Script, call: ast.Call) -> bool:
    """`model.save_pretrained(folder)`, and not a tokenizer's."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "save_pretrained":
        return False
    return not any(word in script.words(call.func.value).lower() for word in ("tok", "processor", "config"))


def _contents(script: Script, call: ast.Call) -> str:
    """The words of what is saved, of a variable those of what it was given."""
    first = call.args[0] if call.args else call
    words = script.words(first)
    if isinstance(first, ast.Name):
        for node in ast.walk(script.tree):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(item, ast.Name) and item.id == first.id for target in targets for item in ast.walk(target)):
                words += " " + script.words(node)
    return words
