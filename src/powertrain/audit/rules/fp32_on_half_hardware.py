"""fp32 products on hardware whose bf16 or fp16 units lie idle."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import added, set_to
from powertrain.audit.resolved import TRAINERS, dtype_named, products_dtype, seen, value
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.precision import bf16_gain, bf16_pays, bf16_unit, fp16_pays
from powertrain.records.findings import Cure, Expected, Finding, Risk

BESIDE = ("training.per_device_train_batch_size", "training.learning_rate", "training.num_train_epochs", "training.output_dir")


class Fp32OnHalfHardware(Rule):
    name = "fp32_on_half_hardware"
    rests_on = "technique: bf16, fp16"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        hardware, loaded = where.hardware, dtype_named(value(subject, "model.dtype"))
        if hardware is None or products_dtype(subject) != "fp32" or loaded in ("bf16", "fp16"):
            return
        if not bf16_pays(hardware) and not fp16_pays(hardware):
            return
        type_ = "bf16" if bf16_pays(hardware) else "fp16"
        gain = bf16_gain(hardware) if type_ == "bf16" else None
        expected = UNMEASURED if gain is None else Expected(
            f"at most {gain:.1f} times as fast", "formula: this machine's measured GEMM peaks, bf16 over fp32", (1.0, gain))
        key = f"training.{type_}" if subject.framework in TRAINERS else "accelerate.mixed_precision"
        edits = set_to(subject, key, True if subject.framework in TRAINERS else type_) \
            or (added(subject, BESIDE, type_, True) if subject.framework in TRAINERS and key not in subject.settings else ())
        unit = bf16_unit(hardware) if type_ == "bf16" else f"{hardware.name} has fp16 tensor cores"
        yield cls.found("moderate", f"fp32 where there is {type_}", f"{unit}, and all matrix products are computed in fp32",
                        seen(subject, key), expected=expected, risk=Risk("none", "low", "low"),
                        cure=Cure(f"Compute products in {type_}; weights and optimizer stay fp32", edits,
                                  (f"techniques.{type_}=on",)))
