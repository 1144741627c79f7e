"""Checks of the machine: accelerator, load, battery, threads, memory, disk and the output folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from powertrain.diagnosis.situation import Situation
from powertrain.records.findings import Expected, Finding, Severity, finding, rule
from powertrain.run.fits import checkpoint_bytes, needed_bytes, room_bytes, savings_of

IDLE_LOAD, FULL_LOAD = 0.25, 0.75            # processes that want a core, per core: below the first, the run is undisturbed
TIGHT = 0.9                  # share of the free memory: other processes may take some, and the longest batch is still to come
SWAPPED_BYTES = 1 << 28      # swap in use, from which the machine has probably been short of memory
GIB, MIB = 2**30, 2**20


@rule("fact: torch.cuda.is_available, and the driver's own files")
def accelerator(where: Situation) -> Iterator[Finding]:
    """A GPU is present and the run does not use it, or uses one of several."""
    hardware, machine = where.prepared.facts.hardware, where.machine
    if hardware.device == "cpu" and machine.has_nvidia_driver:
        reason = "sees no GPU: the driver does not match, or CUDA_VISIBLE_DEVICES hides it" if machine.torch_has_cuda else \
            "was built without CUDA"
        yield finding("critical", "this machine has a GPU, and the run would train on the CPU",
                      f"the NVIDIA driver has found a GPU, and torch {reason}", f"device {hardware.device}",
                      cure="install a torch build that matches the driver, or unset CUDA_VISIBLE_DEVICES; "
                           "then run `powertrain facts`")
    elif hardware.devices > 1:
        yield finding("low", f"one of {hardware.devices} GPUs trains", "a run is one process on one GPU",
                      f"{hardware.devices} x {hardware.name}", numbers={"devices": hardware.devices},
                      cure="use the other GPUs for other runs (CUDA_VISIBLE_DEVICES=1, 2, ...)")
    elif hardware.device == "cpu":
        yield finding("good", "this machine has no GPU", f"{hardware.name} trains on {hardware.cores} cores",
                      hardware.sources.get("device", "device cpu"))
    else:
        yield finding("good", f"{hardware.name} trains", "torch sees this GPU", f"device {hardware.device}")


@rule("fact: the load average of the last minute")
def busy(where: Situation) -> Iterator[Finding]:
    """Other processes compute on this machine: they take cores and distort every measurement of speed."""
    load, cores = where.machine.load, where.prepared.facts.hardware.cores
    seen = f"load {load:.1f} on {cores} core{'s' if cores > 1 else ''}"
    on_cpu = where.prepared.facts.hardware.device == "cpu"
    if load > IDLE_LOAD * cores:
        severity: Severity = "moderate" if on_cpu and load > FULL_LOAD * cores else "low"
        why = "other processes take cores from the run" if on_cpu else \
            "other processes take cores that prepare batches and launch kernels"
        yield finding(severity, "other processes compute", why, seen, numbers={"load": load, "cores": cores},
                      cure="end the other processes, or wait for them; `top` lists them")
    else:
        yield finding("good", "the machine is idle", "no other process takes cores from the run", seen)


@rule("fact: psutil.sensors_battery")
def battery(where: Situation) -> Iterator[Finding]:
    """A laptop runs on its battery, and lowers its clock rate."""
    if where.machine.on_battery:
        yield finding("moderate", "the machine runs on its battery", "most machines lower their clock rate on battery, and the "
                      "battery may run out before the run ends", "power_plugged is False", cure="connect the power supply")


@rule("technique: threads")
def threads(where: Situation) -> Iterator[Finding]:
    """The number of computing threads differs from the number of cores."""
    hardware = where.prepared.facts.hardware
    if hardware.device != "cpu":
        return
    pinned = [step.technique for step in where.prepared.plan.steps if step.technique.name == "threads"]
    count, cores = int(getattr(pinned[0], "threads", 0)) if pinned else where.machine.threads, hardware.cores
    seen = f"{count} threads, {cores} cores ({hardware.sources.get('cores', 'counted')})"
    words, numbers = (f"techniques.threads.threads={cores}",), {"threads": count, "cores": cores}
    if count < cores:
        yield finding("moderate", f"{cores - count} of {cores} cores stay idle", "matrix products divide among threads, and "
                      "there are fewer threads than cores", seen, cure="use one thread for each core", words=words,
                      numbers=numbers, expected=Expected(f"at most {cores / count:.2g} times as fast",
                                                         "formula: cores over threads", (1.0, cores / count)))
    elif count > cores:
        yield finding("moderate", "there are more threads than cores", "all threads wait at the end of each parallel region "
                      "for the thread that got no core", seen, cure="use one thread for each core", words=words,
                      numbers=numbers)
    else:
        yield finding("good", "there is one thread for each core", "all cores compute", seen)


@rule("formula: the simulated allocator of cost/memory.py")
def memory(where: Situation) -> Iterator[Finding]:
    """A step needs more memory than is free, or nearly as much; or the machine has swapped."""
    prepared = where.prepared
    if prepared.facts.model.provider == "native":
        needed, room = needed_bytes(prepared.facts, prepared.plan), room_bytes(prepared.facts)
        seen = f"a step needs {needed / GIB:.2f} GiB at its peak, and {room / GIB:.2f} GiB are free"
        if needed > TIGHT * room:
            saving = next((saving for saving in savings_of(prepared) if saving.enough), None)
            fits = needed <= room
            yield finding("moderate" if fits else "critical",
                          "a step only just fits the memory" if fits else "a step does not fit the memory",
                          "training may run out of memory, or the machine may swap", seen,
                          cure="free some memory" if saving is None else f"save {saving.bytes / GIB:.2f} GiB",
                          words=() if saving is None else tuple(saving.words.split()),
                          numbers={"needed_bytes": needed, "room_bytes": room},
                          expected=Expected("the step fits", "formula: simulated allocator"))
        else:
            yield finding("good", "a step fits the memory", "its peak is below the free memory", seen)
    if where.machine.swap_used_bytes > SWAPPED_BYTES:
        yield finding("low", "the machine has swapped", "memory that was swapped out is read back from a disk",
                      f"{where.machine.swap_used_bytes / GIB:.2f} GiB of swap are in use",
                      cure="end processes that hold memory and do not use it")


@rule("formula: 12 bytes per trained weight and checkpoint")
def disk(where: Situation) -> Iterator[Finding]:
    """The disk has too little room for the checkpoints that the recipe keeps."""
    limit, each = where.prepared.recipe.save_total_limit, checkpoint_bytes(where.prepared)
    free, numbers = where.machine.disk_free_bytes, {"free_bytes": where.machine.disk_free_bytes, "checkpoint_bytes": each}
    needed = (limit + 2) * each              # the kept ones, the best one, and a new one while it is written
    seen = f"{free / MIB:,.0f} MiB free on the disk of {where.machine.disk}, a checkpoint takes {each / MIB:,.0f} MiB"
    if free < 2 * each:
        yield finding("critical", "the disk has no room for a checkpoint and the model", "the trained weights could not be "
                      "saved", seen, cure="free some space, or put the run on another disk with --output", numbers=numbers)
    elif free < needed:
        yield finding("moderate", f"the disk has no room for {limit} kept checkpoints", "saving would fail later in the run",
                      seen, cure="free some space, or keep fewer checkpoints", words=("save_total_limit=1",), numbers=numbers)
    else:
        yield finding("good", "the disk has room", f"for {limit} kept checkpoints, the best one and a new one", seen)


@rule("fact: the files in output_dir")
def output_folder(where: Situation) -> Iterator[Finding]:
    """The output folder already holds another run."""
    named = where.prepared.recipe.output_dir
    if named is not None and Path(named, "recipe.yaml").exists():
        yield finding("critical", "the output folder holds another run", "`powertrain train` does not write over a run",
                      f"output_dir={named}", keys=("output_dir",),
                      cure=f"continue that run with `powertrain train --resume {named}`, or name another folder with --output")
