"""fp16 products on a GPU that multiplies fp16 more slowly than fp32."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.resolved import products_dtype, seen
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.precision import FP16_SINCE
from powertrain.records.findings import Cure, Finding, Risk

FAST_PASCAL = (6, 0)         # P100: twice as many fp16 as fp32 operations; the other Pascals have 1 for each 64
KEY = "training.fp16"


class Fp16WithoutTensorCores(Rule):
    name = "fp16_without_tensor_cores"
    rests_on = "technique: fp16; features: F22; documentation: CUDA's table of arithmetic throughputs"
    gives_way_to = frozenset({"both_half_precisions"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        hardware = where.hardware
        if hardware is None or hardware.compute_capability is None or products_dtype(subject) != "fp16":
            return
        if hardware.compute_capability < FP16_SINCE and hardware.compute_capability != FAST_PASCAL:
            yield cls.found("moderate", "fp16 on a GPU without fast fp16", f"{hardware.name} has compute capability "
                            f"{hardware.compute_capability}: no tensor cores, which begin at {FP16_SINCE}, and hardly any fp16 "
                            "units. What is saved is the memory of activations; products may be slower than in fp32",
                            seen(subject, KEY if "accelerate.mixed_precision" not in subject.settings
                                 else "accelerate.mixed_precision"), expected=UNMEASURED, risk=Risk("low", "none", "low"),
                            cure=Cure("Compute in fp32 if it fits, and measure both", set_to(subject, KEY, False),
                                      ("techniques.fp16=off",)))
