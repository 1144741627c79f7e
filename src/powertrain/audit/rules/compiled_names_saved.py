"""Weights saved under the names of the compiled wrapper."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding


class CompiledNamesSaved(Rule):
    name = "compiled_names_saved"
    rests_on = "features: 5.3 (document 003's checkpoints); documentation: torch.compile (state_dict of an OptimizedModule)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or "_orig_mod" in script.text:
            return
        for call in script.calls(".state_dict"):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else call
            if isinstance(owner, (ast.Name, ast.Attribute)) and script.is_made_by(owner, "torch.compile"):
                yield cls.found(
                    "low", "weights are saved under the compiled model's names", "torch.compile wraps the model, and every "
                    "key of its state_dict begins with `_orig_mod.`: an uncompiled model does not load it",
                    script.evidence(call), expected=NO_SPEED,
                    cure=Cure("Compile in place (`model.compile()`), or save `model._orig_mod.state_dict()`"))
                return
