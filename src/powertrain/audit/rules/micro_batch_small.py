"""Many small passes where memory would hold larger ones."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import as_trained, reckonable
from powertrain.audit.resolved import accumulation, examples_per_pass, is_on, seen
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.cost.fitting import largest_micro_batch, own_bytes, planned_room_bytes
from powertrain.records import Facts
from powertrain.records.findings import Cure, Finding

MANY = 4                     # passes a step; fewer cost little


class MicroBatchSmall(Rule):
    name = "micro_batch_small"
    rests_on = ("technique: micro_batch; features: X7 (accumulation runs the same small passes; it is the pass that fills a "
                "device)")

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        each, times = examples_per_pass(subject), accumulation(subject)
        if each is None or times is None or each > 2 or times < MANY or is_on(subject, "training.packing"):
            return
        facts = reckonable(where)
        larger = _larger(subject, facts, each, times) if facts else None
        if facts is not None and larger is None:
            return
        says = f"{larger} fit here" if larger else "how many fit is not known here; `powertrain plan` reckons it"
        one = "training.per_device_train_batch_size"
        yield cls.found("moderate" if larger else "low", "small passes, accumulated", f"A step is {times} passes of {each} "
                        f"{'example' if each == 1 else 'examples'}: weights are read and kernels started {times} times; {says}",
                        seen(subject, one), seen(subject, "training.gradient_accumulation_steps"), expected=UNMEASURED,
                        cure=Cure(f"Take {larger} examples a pass and accumulate {each * times // larger} times" if larger else
                                  "Take the largest pass that fits, and accumulate accordingly less",
                                  (*set_to(subject, one, larger),
                                   *set_to(subject, "training.gradient_accumulation_steps", each * times // larger))
                                  if larger else (), ("techniques.micro_batch=on",)))


def _larger(subject: Subject, facts: Facts, each: int, times: int) -> int | None:
    """The largest pass that fits and divides the step's examples, if it is twice as large or more."""
    workload = as_trained(subject, facts)
    room = planned_room_bytes(facts.hardware) - own_bytes(facts.hardware.device)
    fits = largest_micro_batch(facts.model, workload, room)
    divisors = [count for count in range(2 * each, each * times + 1) if count <= fits and each * times % count == 0]
    return max(divisors, default=None)
