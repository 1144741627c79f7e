"""Rules on what is done well, so that nobody changes it."""

from __future__ import annotations

from powertrain.audit.reckoning import GIB, room
from powertrain.audit.resolved import (
    TRAINERS,
    accumulation,
    examples_per_pass,
    examples_per_step,
    is_four_bit,
    is_on,
    is_unread,
    processes,
    products_dtype,
    seen,
)
from powertrain.audit.rules.base import Findings, found
from powertrain.audit.rules.memory import CHECKPOINTING, PASS, TIMES
from powertrain.audit.rules.precision import asked_for
from powertrain.audit.subject import Circumstances, Subject
from powertrain.cost.precision import bf16_unit, fp16_pays
from powertrain.records.findings import rule

FEWEST = 4                   # examples a step; the gradient of fewer is mostly noise
KEEP = "Keep it"


@rule("features: X7 (utilisation comes from the pass; accumulation only adds passes)",
      gives_way_to=("batch_arithmetic", "batch_beyond_data", "micro_batch_small"))
def good_batch(subject: Subject, where: Circumstances) -> Findings:
    """A step has several examples."""
    each, times, batch = examples_per_pass(subject), accumulation(subject), examples_per_step(subject)
    ranks = processes(subject)
    if each is not None and batch is not None and batch >= FEWEST and PASS in subject.settings:
        says = ("all in one pass" if times == 1 else f"{each} a pass x {times} passes") + (f" x {ranks} processes" if ranks > 1
                                                                                           else "")
        yield found("good", says, subject.settings[PASS], subject.settings.get(TIMES),
                    cure="Keep the product when you change its factors", title=f"{batch} examples a step")


@rule("technique: activation_checkpointing")
def good_checkpointing(subject: Subject, where: Circumstances) -> Findings:
    """Activations are recomputed because they do not fit."""
    space = room(subject, where)
    if space is not None and not is_unread(subject, CHECKPOINTING) and is_on(subject, CHECKPOINTING) and space[0] > space[1]:
        yield found("good", f"A step that keeps all activations would need about {space[0] / GIB:.1f} GiB, and "
                    f"{space[1] / GIB:.1f} GiB are free", seen(subject, CHECKPOINTING), cure=KEEP)


@rule("technique: four_bit_base; features: X10")
def good_four_bit(subject: Subject, where: Circumstances) -> Findings:
    """Weights are 4-bit because bf16 does not fit."""
    space = room(subject, where, four_bits=False)
    if space is not None and is_four_bit(subject) and space[0] > space[1]:
        yield found("good", f"In bf16 a step would need about {space[0] / GIB:.1f} GiB, and {space[1] / GIB:.1f} GiB are "
                    "free", seen(subject, "quantisation.load_in_4bit"), cure=KEEP)


@rule("technique: packing; features: F11", gives_way_to=("packing_leaks",))
def good_packing(subject: Subject, where: Circumstances) -> Findings:
    """Examples are packed and do not see each other."""
    if "training.packing" in subject.settings and is_on(subject, "training.packing"):
        yield found("good", "No slot is padding, and examples do not see each other; a step has more examples than batch "
                    "times accumulation", subject.settings["training.packing"], cure=KEEP)


@rule("technique: bf16, fp16", gives_way_to=("bf16_without_hardware", "both_half_precisions", "fp16_on_bf16_hardware",
                                             "fp16_weights_unscaled"))
def good_precision(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in the type that the hardware is made for."""
    dtype, hardware = products_dtype(subject), where.hardware
    refused = hardware is not None and hardware.device == "cpu" and subject.framework in TRAINERS
    starts = not refused or is_on(subject, "training.use_cpu")
    if dtype == "bf16" and starts and (hardware is None or bf16_unit(hardware)):
        here = f": {bf16_unit(hardware)}" if hardware else ", on hardware that has it"
        yield found("good", f"bf16 has the range of fp32, so no loss needs scaling{here}", asked_for(subject, "training.bf16"),
                    cure=KEEP, title="products in bf16")
    elif dtype == "fp16" and hardware is not None and fp16_pays(hardware):
        yield found("good", f"{hardware.name} has tensor cores for fp16, and none for bf16",
                    asked_for(subject, "training.fp16"), cure=KEEP, title="products in fp16")
