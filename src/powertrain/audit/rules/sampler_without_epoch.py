"""A DistributedSampler that draws the same order in every epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_line
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

SAMPLER = "torch.utils.data.distributed.DistributedSampler"
ALSO = "torch.utils.data.DistributedSampler"


class SamplerWithoutEpoch(Rule):
    name = "sampler_without_epoch"
    rests_on = "documentation: torch.utils.data.distributed.DistributedSampler (set_epoch at the beginning of each epoch)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        call = next(script.calls(SAMPLER, ALSO), None) if script is not None else None
        if script is None or call is None or script.has_call(".set_epoch") or not script.training_loops:
            return
        if any(item.arg == "shuffle" and isinstance(item.value, ast.Constant)
               and not item.value.value for item in call.keywords):
            return
        statement = script.statement(call)
        name = script.words(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        epochs = [loop for loop in script.loops(script.training_loops[0]) if isinstance(loop, ast.For)
                  and isinstance(loop.target, ast.Name)]
        edits = with_line(script, epochs[0].body[0], f"{name}.set_epoch({script.words(epochs[0].target)})") if (
            name and epochs and script.function(epochs[0]) is script.function(call)) else ()
        yield cls.found(
            "moderate", "every epoch sees the data in the same order", "The sampler's order is drawn from its seed and the "
            "epoch's number, and nothing tells it the number", script.evidence(call), expected=NO_SPEED,
            risk=Risk("none", "low", "low"),
            cure=Cure("Call sampler.set_epoch(epoch) at the beginning of each epoch", edits))
