"""Products in the type that the hardware is made for."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import TRAINERS, is_on, products_dtype, seen
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.precision import bf16_unit, fp16_pays
from powertrain.records.findings import Finding


class GoodPrecision(Rule):
    name = "good_precision"
    rests_on = "technique: bf16, fp16"
    gives_way_to = frozenset({"bf16_without_hardware", "both_half_precisions", "fp16_on_bf16_hardware",
                              "fp16_weights_unscaled"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        dtype, hardware = products_dtype(subject), where.hardware
        refused = hardware is not None and hardware.device == "cpu" and subject.framework in TRAINERS
        starts = not refused or is_on(subject, "training.use_cpu")
        asked = seen(subject, f"training.{dtype}" if "accelerate.mixed_precision" not in subject.settings
                     else "accelerate.mixed_precision")
        if dtype == "bf16" and starts and (hardware is None or bf16_unit(hardware)):
            here = f": {bf16_unit(hardware)}" if hardware else ", on hardware that has it"
            yield cls.found("good", "products in bf16", f"It has fp32's range, so that no loss needs scaling{here}", asked,
                            expected=NO_SPEED, cure="Keep it")
        elif dtype == "fp16" and hardware is not None and fp16_pays(hardware):
            yield cls.found("good", "products in fp16", f"{hardware.name} has tensor cores for it, and none for bf16", asked,
                            expected=NO_SPEED, cure="Keep it")
