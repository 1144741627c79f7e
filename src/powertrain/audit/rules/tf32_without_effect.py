"""TF32 asked for where no product is computed in fp32, or where there is no TF32."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import removed
from powertrain.audit.resolved import TRAINERS, products_dtype
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.precision import has_tf32
from powertrain.records.findings import Cure, Expected, Finding


class Tf32WithoutEffect(Rule):
    name = "tf32_without_effect"
    rests_on = "technique: tf32; features: F3 (it changes fp32 matrix products only)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if not subject.on("training.tf32"):
            return
        asked, dtype = subject.settings["training.tf32"], products_dtype(subject)
        cure = Cure("Leave tf32 out", removed(subject, "training.tf32"))
        if where.hardware is not None and not has_tf32(where.hardware):
            severity = "critical" if subject.framework in TRAINERS else "low"
            yield cls.found("critical" if severity == "critical" else "low", "TF32 on hardware without it",
                            f"{where.hardware.name} has no TF32, which begins with compute capability 8.0: TrainingArguments "
                            "raises \"--tf32 requires Ampere\"", asked, expected=Expected("the run starts", "none"), cure=cure)
        elif dtype in ("bf16", "fp16"):
            yield cls.found("low", "TF32 under autocast changes nothing", f"Products are computed in {dtype} by autocast, so "
                            "hardly any is left in fp32 for TF32 to speed up", asked,
                            expected=Expected("none: the documents' factor is that of one fp32 product", "none"), cure=cure)
