"""DDP told to look for parameters that took no part, in every step."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding, Risk, Severity

KEY = "training.ddp_find_unused_parameters"


class UnusedParametersSearched(Rule):
    name = "unused_parameters_searched"
    rests_on = "documentation: torch.nn.parallel.DistributedDataParallel (find_unused_parameters)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.value(KEY) is not True:
            return
        alone = where.hardware is not None and where.hardware.devices == 1
        severity: Severity = "low" if alone else "moderate"
        yield cls.found(severity, "DDP searches for unused parameters", "After each forward pass the graph is walked for "
                        "parameters without a gradient; a decoder uses all of its own, and a step waits for the walk"
                        + ("; on one device nothing reads the setting" if alone else ""), subject.settings[KEY],
                        expected=UNMEASURED, risk=Risk("low", "none", "low"),
                        cure=Cure("Set ddp_find_unused_parameters=False", set_to(subject, KEY, False)))
