"""A model laid over several GPUs in a row, by a script that trains with a process for each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import with_import, with_text
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Expected, Finding, Risk, Severity

SPLITTING = ("auto", "balanced", "balanced_low_0", "sequential")
SEVERAL = ("torch.distributed.init_process_group", "torch.nn.parallel.DistributedDataParallel", "accelerate.Accelerator",
           "accelerate.PartialState")
SIGNS = ("LOCAL_RANK", "WORLD_SIZE", "ddp_find_unused_parameters", "torchrun")


class DeviceMapAuto(Rule):
    name = "device_map_auto"
    rests_on = ("documentation: transformers big_modeling (layers run one device after the other); features: 1.2 (the split it "
                "caused)")

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        setting, hardware = subject.settings.get("model.device_map"), where.hardware
        if setting is None or setting.value not in SPLITTING or not _trains(subject):
            return
        script = subject.script
        several = script is not None and (script.has_call(*SEVERAL) or any(sign in script.text for sign in SIGNS))
        if hardware is not None and hardware.devices <= 1:
            severity: Severity = "low"
            here = "; this machine has one device, so nothing is split here"
        else:
            severity = "critical" if several or hardware is not None else "moderate"
            here = f"; this machine has {hardware.devices}" if hardware is not None else ""
        keyword = _keyword(subject)
        text = '{"": int(os.environ.get("LOCAL_RANK", "0"))}'
        edits = ((*with_text(script, keyword, text), *with_import(script, "os"))
                 if script is not None and keyword is not None else ())
        yield cls.found(
            severity, f"device_map={setting.value!r} splits the model over all GPUs", "Its layers lie on one device after the "
            "other, and at any time all but one wait; a process for each GPU would train that many batches at once" + (
                ", and several processes would each take all GPUs" if several else "") + here,
            setting, expected=Expected("on N GPUs at most N times as fast, with a process for each",
                                       "formula: one of N devices works at a time"),
            risk=Risk("low", "none", "low"),
            cure=Cure("Put the whole model on the process's own device, and start one process for each GPU (torchrun)", edits))


def _trains(subject: Subject) -> bool:
    script = subject.script
    return any(key.startswith("training.") for key in (*subject.settings, *subject.unread)) or bool(
        script is not None and (script.training_loops or script.has_call(".train")))


def _keyword(subject: Subject) -> ast.expr | None:
    """The literal where the model is loaded."""
    call = subject.script.sections.get("model") if subject.script is not None else None
    return next((item.value for item in call.keywords if item.arg == "device_map" and isinstance(item.value, ast.Constant)),
                None) if call is not None else None
