"""A step of several examples, with its arithmetic written out."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.resolved import accumulation, examples_per_pass, examples_per_step, processes
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Finding

KEYS = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
FEWEST = 4                   # examples a step; the gradient of fewer is mostly noise


class GoodBatch(Rule):
    name = "good_batch"
    rests_on = "features: X7 (utilisation comes from the pass; accumulation only adds passes)"
    gives_way_to = frozenset({"batch_arithmetic", "batch_beyond_data", "micro_batch_small"})

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        each, times, batch = examples_per_pass(subject), accumulation(subject), examples_per_step(subject)
        if each is None or batch is None or batch < FEWEST or KEYS[0] not in subject.settings:
            return
        ranks = processes(subject)
        says = ("all in one pass" if times == 1 else f"{each} a pass x {times} passes") + (
            f" x {ranks} processes" if ranks > 1 else "")
        yield cls.found("good", f"{batch} examples a step", says, *(subject.settings.get(key) for key in KEYS),
                        expected=NO_SPEED, cure="Keep the product when you change its factors")
