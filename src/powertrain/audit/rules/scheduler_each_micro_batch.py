"""A learning-rate schedule that advances at every micro-batch instead of every step."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.code_editing import with_line, without
from powertrain.audit.rules.base import NO_SPEED, Circumstances, Rule
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class SchedulerEachMicroBatch(Rule):
    name = "scheduler_each_micro_batch"
    rests_on = "documentation: torch.optim.lr_scheduler (one scheduler step for each optimizer step)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        for step in training_steps(subject.script) if subject.script else ():
            accumulation = step.accumulation
            if accumulation is None or step.accumulates_by_accelerate:
                continue
            call, every = accumulation
            early = [item for item in step.scheduler_steps if not set(call.conditions) & set(item.conditions)
                     and not item.inner_loop]
            if not early:
                continue
            script = step.script
            edits = (*without(script, script.statement(early[0].node)),
                     *with_line(script, script.statement(call.node), script.words(early[0].node), after=True))
            yield cls.found(
                "critical", "the learning rate decays with every micro-batch", f"The optimizer steps every "
                f"{script.words(every)} "
                "passes, the schedule at each: it is through that many times too early, and the rest of the run trains at its "
                "end, often at zero", script.evidence(early[0].node), script.evidence(call.node), expected=NO_SPEED,
                risk=Risk("none", "low", "low"),
                cure=Cure("Step the schedule where the optimizer steps", edits if len(edits) == 2 else ()))
