"""cuDNN's search for the fastest convolution, in a model that has none."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import without
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding

KEY, CONTRARY = "training.cudnn_benchmark", "training.cudnn_deterministic"


class CudnnBenchmark(Rule):
    name = "cudnn_benchmark"
    rests_on = "features: F15; documentation: torch.backends.cudnn.benchmark (\"multiple convolution algorithms\")"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script, setting = subject.script, subject.settings.get(KEY)
        if script is None or setting is None or setting.value is not True or "Conv" in script.text or "conv" in script.text:
            return
        contrary = subject.settings.get(CONTRARY)
        forced = contrary if contrary is not None and contrary.value is True else None
        statement = next((node for node in ast.walk(script.tree) if isinstance(node, ast.Assign)
                          and node.lineno == setting.place.line and "benchmark" in script.words(node)), None)
        yield cls.found(
            "low", "cudnn.benchmark does nothing here", "It chooses between algorithms for convolutions, and no convolution "
            "is in this script: attention and linear layers do not go through cuDNN's search" + (
                "; deterministic=True would forbid the choice anyway" if forced else ""),
            setting, forced, expected=Expected("nothing changes", "fact: there is no convolution"),
            cure=Cure("Take it out", without(script, statement) if statement is not None else ()))
