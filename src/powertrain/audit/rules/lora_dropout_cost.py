"""Dropout on what adapters read."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import number
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk

KEY = "lora.lora_dropout"


class LoraDropoutCost(Rule):
    name = "lora_dropout_cost"
    rests_on = "fact: dropout before A gives each adapted layer a second, full-width input to draw, write and keep"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        share, model = number(subject, KEY), where.model
        if KEY not in subject.settings or not share:
            return
        here = ""
        if model is not None:
            layers = len(model.adapted_layers) or model.layers
            inputs = (6 if model.gated_mlp else 5) * model.width + model.mlp_width     # of a block's linear layers
            here = f", about {layers * inputs:,} random numbers a token here with adapters on all linear layers"
        yield cls.found("low", "dropout on the adapters' inputs", "Each adapted layer draws a mask as wide as its "
                        f"input{here}, and fused kernels for adapters do without it",
                        subject.settings[KEY], expected=UNMEASURED,
                        risk=Risk("none", "low", "low"),
                        cure=Cure("Leave it out unless the run goes over little data many times",
                                  set_to(subject, KEY, 0.0), ("lora.dropout=0",)))
