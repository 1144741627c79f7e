"""A file that every process of a run writes at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

RANKED = ("rank", "main_process", "master", "process_index", "is_world_process_zero")
SAVING = ("torch.save", "safetensors.torch.save_file")


class SavedByEveryProcess(Rule):
    name = "saved_by_every_process"
    rests_on = "documentation: torch tutorial \"getting started with DistributedDataParallel\", save and load checkpoints"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or not script.has_call("torch.distributed.init_process_group"):
            return
        for call in script.calls(*SAVING):
            tests = [script.words(condition.test) for condition in script.conditions(call)]
            function = script.function(call)
            for caller in ast.walk(script.tree):
                if function is not None and isinstance(caller, ast.Call) and script.called(caller) is function:
                    tests += [script.words(condition.test) for condition in script.conditions(caller)]
            body = script.words(function) if function is not None else ""
            text = " ".join(tests) + (body if "return" in body else "")          # `if rank != 0: return` counts too
            if not any(word in text for word in RANKED) and not any(word in script.words(call) for word in RANKED):
                yield cls.found(
                    "moderate", "every process writes the same file", "Processes that write one file at once can leave it "
                    "broken, and each writes the whole model", script.evidence(call), expected=NO_SPEED,
                    cure=Cure("Save in the process of rank 0 only, and let the others wait at a barrier"))
                return
