"""bf16 asked for where nothing multiplies bf16."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import TRAINERS, is_on, products_dtype, seen
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.precision import BF16_SINCE, bf16_unit
from powertrain.records.findings import Cure, Expected, Finding, Risk


class Bf16WithoutHardware(Rule):
    name = "bf16_without_hardware"
    rests_on = "technique: bf16; features: F18 (torch says that bf16 is supported where it is emulated)"
    gives_way_to = frozenset({"both_half_precisions"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        hardware = where.hardware
        if hardware is None or hardware.device == "mps" or products_dtype(subject) != "bf16":
            return
        asked = seen(subject, "training.bf16" if "accelerate.mixed_precision" not in subject.settings
                     else "accelerate.mixed_precision")
        if bf16_unit(hardware) is None:
            lacks = f"{hardware.name} has compute capability {hardware.compute_capability}, and bf16 begins at {BF16_SINCE}" \
                if hardware.device == "cuda" else f"{hardware.name} has neither AMX nor AVX512-BF16"
            other = "fp16" if hardware.device == "cuda" else "fp32"
            yield cls.found("critical", "bf16 on hardware without it", f"{lacks}: it is emulated, or the trainer refuses to "
                            "start",
                            asked, expected=UNMEASURED, risk=Risk("low", "low", "low"),
                            cure=Cure(f"Compute in {other} on this machine", set_to(subject, "training.bf16", False),
                                      ("techniques.bf16=off",)))
        elif hardware.device == "cpu" and subject.framework in TRAINERS and not is_on(subject, "training.use_cpu"):
            yield cls.found("critical", "bf16 on a CPU without use_cpu",
                            f"{hardware.name} multiplies bf16, but without a GPU TrainingArguments raises \"Your setup "
                            "doesn't support bf16/gpu. You need to assign use_cpu\"", asked,
                            expected=Expected("the run starts", "documentation: TrainingArguments._validate_args"),
                            cure="Set use_cpu=True where the run is to be on this machine's CPU")
