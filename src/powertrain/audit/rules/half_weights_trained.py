"""All weights trained in bf16, whose eight bits of mantissa swallow small updates."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import dtype_named, method, number, value
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class HalfWeightsTrained(Rule):
    name = "half_weights_trained"
    rests_on = "fact: bf16 has 8 bits of mantissa, so a weight changes by 2^-9 of itself or not at all"
    gives_way_to = frozenset({"fp16_weights_unscaled"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        dtype = dtype_named(value(subject, "model.dtype"))
        if dtype not in ("bf16", "fp16") or method(subject) != "full":
            return
        rate = number(subject, "training.learning_rate")
        step = f"; AdamW moves a weight by about the learning rate, {rate:g}: those above {rate * 512:g} stay where they are" \
            if rate and dtype == "bf16" else ""
        yield cls.found("moderate", f"all weights are trained in {dtype}", f"The weights themselves are {dtype}, and with "
                        f"them the updates and AdamW's moments{step}", subject.settings["model.dtype"], expected=NO_SPEED,
                        risk=Risk("low", "none", "low"),
                        cure=Cure("Load the weights in fp32 and let autocast compute in bf16; it takes 12 bytes more a "
                                  "weight, moments included", (), ("method=full",)))
