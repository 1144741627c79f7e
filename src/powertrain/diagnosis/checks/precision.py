"""The type of the matrix products against what this device multiplies fast."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain import planner
from powertrain.cost.precision import bf16_gain, bf16_pays, bf16_unit
from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding


class Precision(Check):
    name = "precision"
    rests_on = "technique: bf16; features X6, F18, F22"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        hardware = where.prepared.facts.hardware
        dtype, gain = planner.workload_of(where.prepared.facts, where.prepared.plan).dtype, bf16_gain(hardware)
        shown = "" if gain is None else f"; bf16 products were measured {gain:.2g} times as fast as fp32 ones"
        seen = f"products in {dtype} on {hardware.name}{shown}"
        if dtype == "bf16" and not bf16_pays(hardware):
            why = "this device only emulates bf16" if bf16_unit(hardware) is None else "bf16 products are no faster here"
            yield cls.says("moderate", "bf16 is pinned on, and does not pay here", why, seen=seen, cure="compute in fp32",
                           words=("techniques.bf16=off",), expected=cls._expected(None if gain is None else 1 / gain))
        elif dtype == "fp32" and bf16_pays(hardware):
            yield cls.says("moderate", "products are computed in fp32 where bf16 is faster", f"{bf16_unit(hardware)}",
                           seen=seen, cure="compute products in bf16", words=("techniques.bf16=on",),
                           expected=cls._expected(gain))
        elif dtype == "fp16" and bf16_pays(hardware):
            yield cls.says("low", "fp16 where bf16 would do", "fp16 overflows and needs loss scaling; bf16 has fp32's range at "
                           "the same speed", seen=seen, cure="compute products in bf16",
                           words=("techniques.fp16=off", "techniques.bf16=on"))
        else:
            yield cls.says("good", f"products are computed in {dtype}", "no other type is known to be faster here", seen=seen)

    @classmethod
    def _expected(cls, gain: float | None) -> Expected:
        if gain is None or gain <= 1:
            return Expected("not measured here", "none")
        return Expected(f"at most {gain:.2g} times as fast, if a step were products alone", "formula: the measured GEMM peaks",
                        (1.0, gain))
