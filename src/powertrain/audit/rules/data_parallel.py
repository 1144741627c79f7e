"""DataParallel: one process that copies the model to every GPU at every step."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk


class DataParallelUsed(Rule):
    name = "data_parallel"
    rests_on = ("documentation: torch.nn.DataParallel (\"recommended to use DistributedDataParallel, even on one node\"); "
                "features: F2")

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        call = next(subject.script.calls("torch.nn.DataParallel"), None) if subject.script else None
        if call is None or subject.script is None:
            return
        alone = where.hardware is not None and where.hardware.devices <= 1
        yield cls.found(
            "low" if alone else "moderate", "DataParallel copies the model to every GPU at every step",
            "One Python process drives all devices: it scatters the batch, copies all weights, and gathers outputs and "
            "gradients on the first device, which fills up before the others" + (
                "; one device is here, where it does nothing" if alone else ""),
            subject.script.evidence(call), expected=UNMEASURED, risk=Risk("medium", "none", "medium"),
            cure=Cure("Use DistributedDataParallel with a process for each GPU (torchrun)"))
