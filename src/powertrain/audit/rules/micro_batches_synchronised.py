"""Gradients exchanged between processes at every micro-batch of an accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk

PARALLEL = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
HELD_BACK = (".no_sync", ".accumulate", ".set_requires_gradient_sync")


class MicroBatchesSynchronised(Rule):
    name = "micro_batches_synchronised"
    rests_on = "documentation: torch.nn.parallel.DistributedDataParallel.no_sync"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        if script is None or script.has_call(*HELD_BACK) or "require_backward_grad_sync" in script.text:
            return
        wrapped = next(script.calls(*PARALLEL), None) or (
            next(script.calls(".prepare"), None) if subject.framework == "accelerate" else None)
        for step in training_steps(script) if wrapped is not None else ():
            accumulation = step.accumulation
            if accumulation is None or wrapped is None:
                continue
            single = where.hardware is not None and where.hardware.devices <= 1
            yield cls.found(
                "low" if single else "moderate", "processes exchange gradients at every micro-batch",
                f"Only every {script.words(accumulation[1])}th backward() is followed by a step, but each sends all gradients "
                f"to "
                "all processes", script.evidence(wrapped), script.evidence(step.backward[0].node),
                expected=Expected(f"1 instead of {script.words(accumulation[1])} exchanges for each step", "formula: one for "
                "each backward pass that synchronises"), risk=Risk("low", "none", "low"),
                cure=Cure("Run all but the last micro-batch under `with model.no_sync():` (Accelerate: "
                "`accelerator.accumulate`)"))
            return
