"""A model that another library computes: most techniques have nothing to act on then."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding


class Provider(Check):
    name = "provider"
    rests_on = "fact: the model's config.json"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        prepared = where.prepared
        if prepared.facts.model.provider == "native":
            return
        idle = [refusal.technique for refusal in prepared.plan.refused if "is computed by" in refusal.because]
        native = prepared.material.providers.get("native", "")
        can_be_native = native is None
        yield cls.says("moderate" if can_be_native else "low", f"{prepared.facts.model.provider} computes the model",
                       f"{len(idle)} techniques act inside of the native decoder only: {', '.join(idle)}",
                       seen=prepared.resolved.origins.get("model.provider", "model.provider") if can_be_native else str(native),
                       cure="let the native decoder compute it" if can_be_native else "nothing: native does not know it",
                       words=("model.provider=native",) if can_be_native else ())
