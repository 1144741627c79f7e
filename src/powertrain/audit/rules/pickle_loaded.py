"""A file opened by torch.load in a way that runs the code in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_argument
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

SAFE_SINCE = (2, 6)          # torch: weights_only became the default


class PickleLoaded(Rule):
    name = "pickle_loaded"
    rests_on = "documentation: torch.load (\"weights_only=False will execute arbitrary code\")"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script, version = subject.script, where.version("torch")
        for call in script.calls("torch.load") if script is not None else ():
            given = next((item.value for item in call.keywords if item.arg == "weights_only"), None)
            asked = isinstance(given, ast.Constant) and given.value is False
            if script is None or (given is not None and not asked) or (given is None and version is not None
                                                                       and version >= SAFE_SINCE):
                continue
            yield cls.found(
                "moderate" if asked else "low", "a checkpoint is unpickled", "A pickle runs whatever code its author put in; "
                "with weights_only=True only tensors and plain values are read" + (
                    "" if asked else ". Before torch 2.6 that is not the default"),
                script.evidence(call), expected=NO_SPEED, risk=Risk("low", "none", "low"),
                cure=Cure("Load with weights_only=True, or keep weights in safetensors",
                          with_argument(script, call, "weights_only", "True")))
            return
