"""Autograd's search for the origin of NaN, left on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import without
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Finding

NAMES = ("torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly", "torch.autograd.detect_anomaly")


class AnomalyDetectionOn(Rule):
    name = "anomaly_detection_on"
    rests_on = "documentation: torch.autograd.detect_anomaly (\"should be enabled only for debugging\")"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        script = subject.script
        for call in script.calls(*NAMES) if script is not None else ():
            given = call.args[0] if call.args else next((item.value for item in call.keywords if item.arg == "mode"), None)
            off = isinstance(given, ast.Constant) and not given.value
            if script is None or off or script.conditions(call) or (given is not None and not isinstance(given, ast.Constant)):
                continue
            statement = script.statement(call)
            yield cls.found(
                "moderate", "autograd searches for anomalies in every step", "It records a Python traceback for every "
                "operation of the forward pass, and checks every gradient for NaN, which waits for the device",
                script.evidence(call), expected=UNMEASURED,
                cure=Cure("Leave it to debugging", without(script, statement) if isinstance(statement, ast.Expr) else ()))
            return
