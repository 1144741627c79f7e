"""Rules on runs of several processes or devices."""

from __future__ import annotations

import ast

from powertrain.audit.code_editing import with_import, with_text
from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.steps import training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import UNMEASURED, Expected, Severity, rule

SPLITTING = ("auto", "balanced", "balanced_low_0", "sequential")
PARALLEL = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
HELD_BACK = (".no_sync", ".accumulate", ".set_requires_gradient_sync")
UNUSED = "training.ddp_find_unused_parameters"
RANKED = ("rank", "main_process", "master", "process_index", "is_world_process_zero")


@rule("documentation: torch.nn.DataParallel (\"recommended to use DistributedDataParallel, even on one node\"); features: F2")
@of_script
def data_parallel(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """DataParallel copies the model to every GPU at every step."""
    call = next(script.calls("torch.nn.DataParallel"), None)
    alone = where.hardware is not None and where.hardware.devices <= 1
    if call is not None:
        yield found("low" if alone else "moderate", "One Python process drives all devices. It scatters the batch, copies all "
                    "weights, and gathers outputs and gradients on the first device, which fills up before the others" + (
                    "; here is one device, where it does nothing" if alone else ""), script.evidence(call), expected=UNMEASURED,
                    breaking="medium", difficulty="medium",
                    cure="Use DistributedDataParallel with a process for each GPU (torchrun)")


@rule("documentation: transformers big_modeling (layers run one device after the other); features: 1.2 (the split it caused)")
def device_map_auto(subject: Subject, where: Circumstances) -> Findings:
    """device_map splits the model over all GPUs, of which one works at a time."""
    setting, hardware, script = subject.settings.get("model.device_map"), where.hardware, subject.script
    if setting is None or setting.value not in SPLITTING or not _trains(subject):
        return
    several = script is not None and script.has_call("torch.distributed.init_process_group", *PARALLEL)
    if hardware is not None and hardware.devices <= 1:
        severity: Severity = "low"
        here = "; this machine has one device, so nothing is split here"
    else:
        severity = "critical" if several else "moderate"
        here = f"; this machine has {hardware.devices}" if hardware is not None else ""
    call = script.sections.get("model") if script is not None else None
    keyword = next((item.value for item in call.keywords if item.arg == "device_map" and isinstance(item.value, ast.Constant)),
                   None) if call is not None else None
    edits = ((*with_text(script, keyword, '{"": int(os.environ.get("LOCAL_RANK", "0"))}'), *with_import(script, "os"))
             if script is not None and keyword is not None else ())
    yield found(severity, "Its layers lie on one device after the other, and all devices but one wait. A process for each GPU "
                "would train that many batches at once" + (", and several processes would each take all GPUs" * several) + here,
                setting, breaking="low", expected=Expected("on N GPUs at most N times as fast, with a process for each",
                "formula: one of N devices works at a time"),
                cure="Put the whole model on the process's own device, and start one process for each GPU (torchrun)",
                edits=edits, title=f"device_map={setting.value!r} splits the model over all GPUs")


def _trains(subject: Subject) -> bool:
    script = subject.script
    return any(key.startswith("training.") for key in (*subject.settings, *subject.unread)) or bool(
        script is not None and (script.training_loops or script.has_call(".train")))


@rule("documentation: torch.nn.parallel.DistributedDataParallel.no_sync")
@of_script
def micro_batches_synchronised(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Processes exchange gradients at every micro-batch of an accumulation."""
    if script.has_call(*HELD_BACK) or script.says("require_backward_grad_sync", "accumulate("):
        return
    wrapped = next(script.calls(*PARALLEL), None) or (
        next(script.calls(".prepare"), None) if subject.framework == "accelerate" else None)
    step = next((step for step in training_steps(script) if step.accumulation is not None),
                None) if wrapped is not None else None
    if wrapped is not None and step is not None and step.accumulation is not None and step.backward:
        every = script.words(step.accumulation.every)
        single = where.hardware is not None and where.hardware.devices <= 1
        yield found("low" if single else "moderate",
                    f"A step follows only every {every} backward passes, but each pass sends all gradients to all processes",
                    script.evidence(wrapped), script.evidence(step.backward[0].node), breaking="low",
                    expected=Expected(f"1 instead of {every} exchanges for each step",
                    "formula: one for each backward pass that synchronises"), cure="Run all but the last micro-batch under "
                    "`with model.no_sync():` (Accelerate: `accelerator.accumulate`)")


@rule("documentation: torch.nn.parallel.DistributedDataParallel (find_unused_parameters)")
def unused_parameters_searched(subject: Subject, where: Circumstances) -> Findings:
    """DDP searches for unused parameters in every step."""
    alone = where.hardware is not None and where.hardware.devices == 1
    if subject.value(UNUSED) is True:
        yield found("low" if alone else "moderate", "After each forward pass DDP walks the graph for parameters without a "
                    "gradient, and the step waits. A decoder uses all its parameters" + (
                    "; on one device nothing reads the setting" if alone else ""), subject.settings[UNUSED],
                    expected=UNMEASURED, breaking="low", cure="Set ddp_find_unused_parameters=False",
                    edits=set_to(subject, UNUSED, False))


@rule("documentation: torch tutorial \"getting started with DistributedDataParallel\", save and load checkpoints")
@of_script
def saved_by_every_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Every process writes the same checkpoint."""
    if not script.has_call("torch.distributed.init_process_group"):
        return
    for call in script.calls("torch.save", "safetensors.torch.save_file"):
        function = script.function(call)
        tests = [condition.test for node in (call, *(caller for caller in script.nodes if isinstance(caller, ast.Call)
                 and function is not None and script.called(caller) is function)) for condition in script.conditions(node)]
        text = " ".join(script.words(node) for node in [call, *tests])
        if function is not None and any(isinstance(node, ast.Return) for node in ast.walk(function)):
            text += script.words(function)               # `if rank != 0: return` counts too
        if not any(word in text for word in RANKED):
            yield found("moderate",
                        "Processes that write one file at once can leave it broken, and each writes the whole model",
                        script.evidence(call), cure="Save in the process of rank 0 only, and let the others wait at a "
                        "barrier")
            return
