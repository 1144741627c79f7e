"""Examples that are cut at the length limit: their ends, often the answers, are never learned."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding, Risk

FEW, MANY = 0.01, 0.1        # of the examples


class Truncation(Check):
    name = "truncation"
    rests_on = "fact: the examples, tokenised"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        data = where.prepared.facts.data
        if data.kind == "blocks" or not data.cut_examples:
            return
        share = data.cut_examples / max(1, data.examples)
        limit = where.prepared.recipe.data.max_length or data.max_length
        yield cls.says("critical" if share > MANY else "moderate" if share > FEW else "low",
                       f"{share:.1%} of the examples are cut", f"what lies beyond {limit:,} tokens is not learned, and an "
                       "answer without its end teaches not to stop",
                       seen=f"{data.cut_examples:,} of {data.examples:,} examples",
                       cure="raise the limit if the model reads more, or drop what is too long",
                       words=("data.long_examples=drop",),
                       expected=Expected("the model learns whole answers", "none"), risk=Risk(accuracy="low"))
