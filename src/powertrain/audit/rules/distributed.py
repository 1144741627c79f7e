"""Rules on runs of several processes or devices."""

from __future__ import annotations

import ast

from powertrain.audit.edits import set_to, with_import, with_text
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import Script, argument
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import Severity

SPLITTING = ("auto", "balanced", "balanced_low_0", "sequential")
PARALLEL = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
HELD_BACK = (".no_sync", ".accumulate", ".set_requires_gradient_sync")
UNUSED = "training.ddp_find_unused_parameters"
RANKED = ("rank", "main_process", "master", "process_index", "is_world_process_zero")


@code_rule("documentation: torch.nn.DataParallel (\"recommended to use DistributedDataParallel, even on one node\"); "
           "features: F2")
def data_parallel(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """DataParallel copies the model to every GPU at every step."""
    call, alone = next(script.calls("torch.nn.DataParallel"), None), where.has_one_device
    if call is not None:
        yield found("low" if alone else "moderate", script.evidence(call), alone=alone)


@rule("documentation: transformers big_modeling (layers run one device after the other); features: 1.2 (the split it caused)")
def device_map_auto(subject: Subject, where: Circumstances) -> Findings:
    """device_map splits the model over all GPUs, of which one works at a time."""
    setting, script = subject.settings.get("model.device_map"), subject.script
    if setting is None or setting.value not in SPLITTING or not _trains(subject):
        return
    several = script is not None and script.has_call("torch.distributed.init_process_group", *PARALLEL)
    severity: Severity = "low" if where.has_one_device else "critical" if several else "moderate"
    call = script.sections.get("model") if script is not None else None
    given = argument(call, "device_map") if call is not None else None
    edits = ((*with_text(script, given, '{"": int(os.environ.get("LOCAL_RANK", "0"))}'), *with_import(script, "os"))
             if script is not None and isinstance(given, ast.Constant) else ())
    yield found(severity, setting, edits=edits, asked=setting.value, several=several, one=where.has_one_device,
                devices=where.hardware.devices if where.hardware is not None and not where.has_one_device else None)


def _trains(subject: Subject) -> bool:
    script = subject.script
    return any(key.startswith("training.") for key in (*subject.settings, *subject.unread)) or bool(
        script is not None and (script.training_loops or script.has_call(".train")))


@code_rule("documentation: torch.nn.parallel.DistributedDataParallel.no_sync")
def micro_batches_synchronised(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Processes exchange gradients at every micro-batch of an accumulation."""
    if script.has_call(*HELD_BACK) or script.says("require_backward_grad_sync", "accumulate("):
        return
    wrapped = next(script.calls(*PARALLEL), None) or (
        next(script.calls(".prepare"), None) if subject.framework == "accelerate" else None)
    step = next((step for step in training_steps(script) if step.accumulation is not None), None)
    if wrapped is not None and step is not None and step.accumulation is not None and step.backward:
        yield found("low" if where.has_one_device else "moderate", script.evidence(wrapped),
                    script.evidence(step.backward[0].node), every=script.words(step.accumulation.every))


@rule("documentation: torch.nn.parallel.DistributedDataParallel (find_unused_parameters)")
def unused_parameters_searched(subject: Subject, where: Circumstances) -> Findings:
    """DDP searches for unused parameters in every step."""
    if subject.value(UNUSED) is True:
        alone = where.has_one_device
        yield found("low" if alone else "moderate", subject.settings[UNUSED], edits=set_to(subject, UNUSED, False), alone=alone)


@code_rule("documentation: torch tutorial \"getting started with DistributedDataParallel\", save and load checkpoints")
def saved_by_every_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Every process writes the same checkpoint."""
    if not script.has_call("torch.distributed.init_process_group"):
        return
    for call in script.calls("torch.save", "safetensors.torch.save_file"):
        function = script.function(call)
        tests = [condition.test for node in (call, *script.callers(function)) for condition in script.conditions(node)]
        text = " ".join(script.words(node) for node in [call, *tests])
        if function is not None and any(isinstance(node, ast.Return) for node in ast.walk(function)):
            text += script.words(function)               # `if rank != 0: return` counts too
        if not any(word in text for word in RANKED):
            yield found("moderate", script.evidence(call))
            return
