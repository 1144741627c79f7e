"""Blocks that overlap: an epoch then visits each token several times."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding

OFTEN = 8.0                  # times an epoch that each token is visited


class Redundancy(Check):
    name = "redundancy"
    rests_on = "documentation: 003, whose windows start at every character"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        data = where.prepared.facts.data
        if data.kind != "blocks" or data.redundancy <= 1:
            return
        by_epochs = where.prepared.recipe.max_steps is None and where.prepared.recipe.train_time_s is None
        yield cls.says("moderate" if by_epochs and data.redundancy >= OFTEN else "low",
                       f"an epoch visits each token {data.redundancy:.3g} times",
                       "epochs are longer by that, and their blocks are nearly alike", seen=f"data.block={data.block}, "
                       f"data.stride={data.stride}", cure="let blocks follow each other", words=(f"data.stride={data.block}",),
                       expected=Expected(f"an epoch is {data.redundancy:.3g} times as short", "formula: block over stride"))
