"""4 bits where the base would fit as it is: they save memory, and cost time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding
from powertrain.run.fits import needed_bytes, room_bytes


class Quantisation(Check):
    name = "quantisation"
    rests_on = "features: X10; technique: four_bit_base"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        facts, plan = where.prepared.facts, where.prepared.plan
        if facts.model.method != "qlora" or facts.model.provider != "native":
            return
        whole = replace(facts.model, method="lora", frozen_dtype=facts.model.unquantised_dtype or "fp32", unquantised_dtype="")
        steps = tuple(step for step in plan.steps if step.technique.name != "four_bit_base")
        needed, room = needed_bytes(replace(facts, model=whole), replace(plan, steps=steps)), room_bytes(facts)
        if needed <= room:
            seen = f"{needed / 2**30:.2f} GiB would be needed, and {room / 2**30:.2f} GiB are free"
            yield cls.says("moderate", "the base would fit unquantised", "4-bit weights are unpacked for every product, which "
                           "takes time and saves memory that is not needed", seen=seen,
                           cure="train adapters on the base as it is", words=("method=lora",),
                           expected=Expected("faster, and nearer to the base", "none"))
