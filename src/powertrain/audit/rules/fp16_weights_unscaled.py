"""Trained weights in fp16 under a gradient scaler, which refuses them."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import dtype_named, method, products_dtype, value
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding


class Fp16WeightsUnscaled(Rule):
    name = "fp16_weights_unscaled"
    rests_on = "fact: torch.amp.GradScaler raises \"Attempting to unscale FP16 gradients\""

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        types = dtype_named(value(subject, "model.dtype")), products_dtype(subject)
        if types == ("fp16", "fp16") and method(subject) == "full":
            yield cls.found("critical", "fp16 weights under a gradient scaler", "All weights are loaded in fp16 and trained "
                            "with fp16=True: the scaler needs fp32 weights, and the first step ends in \"Attempting to "
                            "unscale FP16 gradients\"", subject.settings["model.dtype"], subject.settings.get("training.fp16"),
                            expected=Expected("the run starts", "none"),
                            cure=Cure("Load the weights in fp32; autocast computes in fp16"))
