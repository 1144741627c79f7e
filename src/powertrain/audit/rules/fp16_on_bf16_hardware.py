"""fp16, with its narrow range and loss scaling, on hardware that has bf16."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import renamed, set_to
from powertrain.audit.resolved import products_dtype, seen
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.precision import bf16_unit
from powertrain.records.findings import Cure, Expected, Finding, Risk


class Fp16OnBf16Hardware(Rule):
    name = "fp16_on_bf16_hardware"
    rests_on = "technique: bf16; features: X6 (equal tensor-core peaks; bf16 needs no loss scaling)"
    gives_way_to = frozenset({"both_half_precisions", "fp16_weights_unscaled"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        hardware = where.hardware
        if products_dtype(subject) != "fp16" or hardware is None:
            return
        unit = bf16_unit(hardware)
        if unit is not None:
            key = "training.fp16" if subject.on("training.fp16") else "accelerate.mixed_precision"
            edits = renamed(subject, "training.fp16", "bf16")
            if "training.bf16" in subject.settings:
                edits = (*set_to(subject, "training.fp16", False), *set_to(subject, "training.bf16", True))
            yield cls.found("moderate", "fp16 where there is bf16", f"bf16 is as fast here ({unit}), and has fp32's range. "
                            "fp16 overflows above 65,504: its steps are scaled, tried, and skipped when a gradient overflows",
                            seen(subject, key), expected=Expected("no skipped steps; about as fast", "none"),
                            risk=Risk("none", "low", "low"),
                            cure=Cure("Compute in bf16", edits, ("techniques.bf16=on",)))
