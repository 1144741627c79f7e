"""Nothing held out: then no evaluation says whether a run learns or learns by heart."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding

FEW_TOKENS = 1000            # from fewer, a loss is mostly chance


class HeldOut(Check):
    name = "held_out"
    rests_on = "documentation: 003's own bug, validation outside of the loop; 004's validation on training data"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        data, share = where.prepared.facts.data, where.prepared.recipe.data.validation_share
        seen = f"{data.validation_tokens:,} tokens are held out (data.validation_share={share})"
        if not len(where.prepared.material.held_out):
            yield cls.says("moderate", "nothing is held out", "no evaluation can be made, and no checkpoint is known to be the "
                           "best", seen=seen, cure="hold some of the data out", words=("data.validation_share=0.05",))
        elif data.validation_tokens < FEW_TOKENS:
            yield cls.says("low", "very little is held out", "a loss over so few tokens is mostly chance", seen=seen,
                           cure="hold more of the data out", words=("data.validation_share=0.1",))
