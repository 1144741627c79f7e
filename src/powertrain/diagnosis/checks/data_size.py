"""Data that is smaller than what a step or a run asks of it."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Expected, Finding, Risk

FEW_EXAMPLES = 10            # 001's own limit for a data set
MANY_EPOCHS = 10


class DataSize(Check):
    name = "data_size"
    rests_on = "fact: the examples, counted"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        data, steps = where.prepared.facts.data, where.prepared.total_steps
        epochs = steps * data.train_batch_size / data.examples
        seen = f"{data.examples:,} examples, {data.train_batch_size} a step, {steps:,} steps: {epochs:.3g} epochs"
        if data.train_batch_size > data.examples:
            yield cls.says("critical", "a step is larger than the data", "it sees examples more than once, so a larger batch "
                           "than the data only repeats work", seen=seen, cure="take a batch no larger than the data",
                           words=(f"train_batch_size={data.examples}",),
                           expected=Expected("the same examples in less time", "formula: examples over batch",
                                             (1.0, data.train_batch_size / data.examples)), risk=Risk(accuracy="low"))
        elif data.examples < FEW_EXAMPLES:
            yield cls.says("moderate", f"there are only {data.examples} examples", "a model learns them by heart", seen=seen,
                           cure="give more data")
        if epochs > MANY_EPOCHS:
            yield cls.says("low", f"every example is seen {epochs:,.0f} times", "held-out loss usually rises long before that",
                           seen=seen, cure="train for fewer epochs, and watch the held-out loss", words=("num_train_epochs=3",))
