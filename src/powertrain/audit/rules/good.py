"""Rules on what is done well, so that nobody changes it."""

from powertrain.audit.rules.base import Findings, found, room, rule
from powertrain.audit.rules.memory import CHECKPOINTING, PASS, TIMES, asked_for
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.cost.precision import bf16_pays, fp16_pays, unit_of

FEWEST = 4                   # examples a step; the gradient of fewer is mostly noise


@rule
def good_batch(subject: Subject, where: Circumstances) -> Findings:
    """A step has several examples."""
    batch, times = subject.examples_per_step, subject.accumulation
    if batch is not None and batch >= FEWEST and PASS in subject.settings:
        ranks = subject.processes
        yield found("good", PASS, subject.settings.get(TIMES), case="whole" if times == 1 else "",
                    batch=batch, each=subject.examples_per_pass, times=times, ranks=ranks if ranks > 1 else None)


@rule
def good_checkpointing(subject: Subject, where: Circumstances) -> Findings:
    """Activations are recomputed because they do not fit."""
    space = room(subject, where)
    if space is not None and not subject.is_unread(CHECKPOINTING) and subject.is_on(CHECKPOINTING) and space[0] > space[1]:
        yield found("good", CHECKPOINTING, needed_gib=space[0], free_gib=space[1])


@rule
def good_four_bit(subject: Subject, where: Circumstances) -> Findings:
    """Weights are 4-bit because bf16 does not fit."""
    space = room(subject, where, four_bits=False)
    if space is not None and subject.is_four_bit and space[0] > space[1]:
        yield found("good", "quantisation.load_in_4bit", needed_gib=space[0], free_gib=space[1])


@rule
def good_packing(subject: Subject, where: Circumstances) -> Findings:
    """Examples are packed and do not see each other."""
    if "training.packing" in subject.settings and subject.is_on("training.packing"):
        yield found("good", "training.packing")


@rule
def good_precision(subject: Subject, where: Circumstances) -> Findings:
    """The run computes in the type that the hardware is made for."""
    dtype, hardware = subject.products_dtype, where.hardware
    refused = where.on_cpu and subject.framework in TRAINERS
    starts = not refused or subject.is_on("training.use_cpu")
    if dtype == "bf16" and starts and (hardware is None or bf16_pays(hardware)):
        yield found("good", asked_for(subject, "training.bf16"), unit=unit_of(hardware, "bf16") if hardware else None,
                    elsewhere=hardware is None)
    elif dtype == "fp16" and hardware is not None and fp16_pays(hardware):
        yield found("good", asked_for(subject, "training.fp16"), case="fp16", name=hardware.name)
