"""Adapters whose output is scaled to almost nothing, or to much."""

from __future__ import annotations

import math
from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import TRAINERS, is_on, number, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

LEAST, MOST = 0.5, 8.0       # of alpha / r; 1 to 2 is usual


class LoraScaling(Rule):
    name = "lora_scaling"
    rests_on = "documentation: peft LoraConfig (scaling = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if "lora.r" not in subject.settings:
            return
        if subject.framework not in TRAINERS and "lora.lora_alpha" not in subject.settings:
            return                           # its default is its own
        rank, alpha = number(subject, "lora.r"), number(subject, "lora.lora_alpha")
        if not rank or alpha is None:
            return
        rooted = is_on(subject, "lora.use_rslora")
        scale = alpha / (math.sqrt(rank) if rooted else rank)
        if LEAST <= scale <= (MOST if not rooted else MOST * 4):
            return
        usual = int(2 * rank)
        # QLoRA's own 16 / 64 is below: it works, with its own learning rate
        yield cls.found("low", "adapters are scaled unusually",
                        f"Their scale, alpha / {'sqrt(r)' if rooted else 'r'}, is {scale:.2g}, where 1 to 2 is usual: "
                        "the adapters' output and gradients are multiplied by it, as if the learning rate were another",
                        seen(subject, "lora.lora_alpha"), seen(subject, "lora.r"), expected=NO_SPEED,
                        risk=Risk("none", "medium", "low"),
                        cure=Cure(f"Set lora_alpha={usual}", set_to(subject, "lora.lora_alpha", usual),
                                  (f"lora.alpha={usual}",)))
