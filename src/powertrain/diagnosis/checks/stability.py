"""What makes training unstable in half precision: nothing that bounds a gradient."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain import planner
from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding


class Stability(Check):
    name = "stability"
    rests_on = "documentation: 001, gradient overflow; 004, training instability"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        recipe = where.prepared.recipe
        dtype = planner.workload_of(where.prepared.facts, where.prepared.plan).dtype
        if recipe.max_grad_norm == 0:
            yield cls.says("moderate" if dtype == "fp16" else "low", "gradients are not clipped", "one bad batch can undo what "
                           "many steps have learned", seen=f"max_grad_norm=0, products in {dtype}",
                           cure="clip gradients at their usual norm", words=("max_grad_norm=1.0",))
        elif dtype == "fp16":
            yield cls.says("good", "fp16 is scaled and clipped", "losses are scaled so that small gradients do not vanish, and "
                           "steps whose gradients overflow are left out", seen=f"max_grad_norm={recipe.max_grad_norm:g}")
