"""The data against the limits that the recipe sets: cut off by them, or never reached."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding


class DataLimits(Check):
    name = "data_limits"
    rests_on = "documentation: 003's diagnose tool, dataset sizes against limits"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        data, recipe = where.prepared.facts.data, where.prepared.recipe.data
        if data.kind == "blocks":
            yield from cls._held("data.max_chars", recipe.max_chars, data.characters, "characters")
        else:
            sources = 1 if isinstance(recipe.source, str) else len(recipe.source)
            most = None if recipe.max_examples is None else sources * recipe.max_examples
            yield from cls._held("data.max_examples", most, data.documents, "rows")

    @classmethod
    def _held(cls, key: str, limit: int | None, found: int, unit: str) -> Iterator[Finding]:
        if limit is None:
            return
        seen = f"{key}={limit:,}, and {found:,} {unit} were read"
        if found >= limit:
            yield cls.says("low", f"the data ends at {key}", f"{unit} beyond it are not trained on", seen=seen,
                           cure="raise it, or leave it out, to train on everything")
        else:
            yield cls.says("low", f"{key} is larger than the data", "it limits nothing", seen=seen, cure="leave it out")
