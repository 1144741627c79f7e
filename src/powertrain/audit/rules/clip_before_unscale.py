"""Scaled gradients clipped: the limit holds for another number."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.code_editing import with_line
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class ClipBeforeUnscale(Rule):
    name = "clip_before_unscale"
    rests_on = "documentation: torch.amp examples, \"gradient clipping\" (unscale_ before clipping)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in training_steps(subject.script) if subject.script else ():
            scaled = [call for call in step.optimizer_steps if call.owner is not None and step.is_scaler(call.owner)]
            for clip in step.clipping if scaled else ():
                if any(call.order < clip.order for call in step.unscaling):
                    continue
                script, owner = step.script, scaled[0].owner or scaled[0].node
                optimizer = script.words(scaled[0].node.args[0]) if scaled[0].node.args else "optimizer"
                line = with_line(script, script.statement(clip.node), f"{script.words(owner)}.unscale_({optimizer})")
                yield cls.found(
                    "critical", "gradients are clipped while they are scaled", "GradScaler has multiplied them by its scale, "
                    "which begins at 65536: every step is cut to a tiny fraction of its gradient, or the limit means nothing",
                    script.evidence(clip.node), script.evidence(scaled[0].node), expected=NO_SPEED,
                    risk=Risk("none", "low", "low"), cure=Cure("Call scaler.unscale_(optimizer) before clipping", line))
                return
