"""The facts that a check may read, and the checks of the machine: accelerator, load, battery, threads, memory and disk."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from powertrain.diagnosis.observed import Observed
from powertrain.diagnosis.wording import told
from powertrain.records import several
from powertrain.records.findings import Cure, Finding, rule
from powertrain.records.plan import PinError
from powertrain.run.fits import checkpoint_bytes, needed_bytes, room_bytes, savings_of
from powertrain.run.folder import RUNS
from powertrain.run.prepare import Prepared

IDLE_LOAD, FULL_LOAD = 0.25, 0.75            # processes that want a core, per core: below the first, the run is undisturbed
TIGHT = 0.9                  # share of the free memory: other processes may take some, and the longest batch is still to come
SWAPPED_BYTES = 1 << 28      # swap in use, from which the machine has probably been short of memory


@dataclass(frozen=True)
class Machine:
    """The state of this machine at one moment."""

    load: float                              # processes that want a core, averaged over the last minute
    threads: int                             # torch's own choice, used if no technique sets another number
    disk: Path                               # the nearest existing folder of the run's folder
    disk_free_bytes: int
    swap_used_bytes: int = 0
    on_battery: bool = False


UNKNOWN = Machine(load=0.0, threads=0, disk=Path(), disk_free_bytes=0)       # of a machine that is not here
OF_THIS_MACHINE = ("accelerator", "busy", "battery", "threads", "disk", "output_folder")        # checks that read its state


@dataclass(frozen=True)
class Situation:
    """Everything that a check may read."""

    prepared: Prepared
    machine: Machine
    refused_pins: tuple[PinError, ...] = ()  # of techniques that the recipe pins on and that cannot run here
    observed: Observed | None = None         # None before a probe, or without one


def run_disk(output_dir: str | None) -> Path:
    """Return the nearest existing folder of the run's folder."""
    wanted = Path(output_dir) if output_dir else RUNS
    return next(folder for folder in (wanted, *wanted.absolute().parents) if folder.is_dir())


def read_machine(prepared: Prepared) -> Machine:
    """Return the machine's state now."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    disk = run_disk(prepared.recipe.output_dir)
    return Machine(
        load=psutil.getloadavg()[0], threads=torch.get_num_threads(), disk=disk, disk_free_bytes=shutil.disk_usage(disk).free,
        swap_used_bytes=int(psutil.swap_memory().used), on_battery=battery is not None and battery.power_plugged is False)


# ------------------------------------------------------------------------------------------------ the checks


@rule("fact: torch.cuda.is_available, and NVIDIA's driver")
def accelerator(where: Situation) -> Iterator[Finding]:
    """A GPU is present and the run does not use it, or uses one of several."""
    hardware = where.prepared.facts.hardware
    if (idle := hardware.idle_gpu) is not None:
        unsure = idle.cause == "no_rocm_build"           # ROCm may not support it
        yield told("accelerator.idle", reason=idle.because, mend=idle.cure, severity="moderate" if unsure else None)
    elif hardware.devices > 1:
        yield told("accelerator.one_of_several", devices=hardware.devices, name=hardware.name)
    elif hardware.device == "cpu":
        yield told("accelerator.none", hardware.sources.get("device", "device cpu"), name=hardware.name, cores=hardware.cores)
    else:
        yield told("accelerator.trains", name=hardware.name, device=hardware.device)


@rule("fact: the load average of the last minute")
def busy(where: Situation) -> Iterator[Finding]:
    """Other processes compute on this machine: they take cores and distort every measurement of speed."""
    load, cores = where.machine.load, where.prepared.facts.hardware.cores
    on_cpu = where.prepared.facts.hardware.device == "cpu"
    case = "idle" if load <= IDLE_LOAD * cores else "on_cpu" if on_cpu else "beside_a_gpu"
    yield told(f"busy.{case}", f"load {load:.1f} on {several(cores, 'core')}", load=load, cores=cores,
               severity="good" if case == "idle" else "moderate" if on_cpu and load > FULL_LOAD * cores else "low")


@rule("fact: psutil.sensors_battery")
def battery(where: Situation) -> Iterator[Finding]:
    """A laptop runs on its battery, and lowers its clock rate."""
    if where.machine.on_battery:
        yield told("battery.in_use")


@rule("technique: threads")
def threads(where: Situation) -> Iterator[Finding]:
    """The number of computing threads differs from the number of cores."""
    hardware = where.prepared.facts.hardware
    if hardware.device != "cpu":
        return
    pinned = [step.technique for step in where.prepared.plan.steps if step.technique.name == "threads"]
    count, cores = int(getattr(pinned[0], "threads", 0)) if pinned else where.machine.threads, hardware.cores
    yield told("threads.fewer" if count < cores else "threads.more" if count > cores else "threads.equal",
               speed=(1.0, cores / count) if count < cores else None, threads=count, cores=cores, idle=cores - count,
               most=cores / count, source=hardware.sources.get("cores", "counted"))


@rule("formula: the simulated allocator of cost/memory.py")
def memory(where: Situation) -> Iterator[Finding]:
    """A step needs more memory than is free, or nearly as much; or the machine has swapped."""
    prepared = where.prepared
    if prepared.facts.model.provider == "native":
        needed, room = needed_bytes(prepared.facts, prepared.plan), room_bytes(prepared.facts)
        saving = next((one for one in savings_of(prepared) if one.enough), None) if needed > TIGHT * room else None
        yield told("memory.fits" if needed <= TIGHT * room else "memory.tight" if needed <= room else "memory.too_little",
                   cure=Cure(f"save {saving.bytes / 2**30:.2f} GiB", words=tuple(saving.words.split())) if saving else None,
                   needed_bytes=needed, room_bytes=room)
    if where.machine.swap_used_bytes > SWAPPED_BYTES:
        yield told("memory.swapped", swap_bytes=where.machine.swap_used_bytes)


@rule("formula: 12 bytes per trained weight and checkpoint")
def disk(where: Situation) -> Iterator[Finding]:
    """The disk has too little room for the checkpoints that the recipe keeps."""
    limit, each, free = where.prepared.recipe.save_total_limit, checkpoint_bytes(where.prepared), where.machine.disk_free_bytes
    needed = (limit + 2) * each              # the kept ones, the best one, and a new one while it is written
    yield told("disk.no_room" if free < 2 * each else "disk.room_for_fewer" if free < needed else "disk.room", limit=limit,
               free_bytes=free, checkpoint_bytes=each, disk=where.machine.disk)


@rule("fact: the files in output_dir")
def output_folder(where: Situation) -> Iterator[Finding]:
    """The output folder already holds another run."""
    named = where.prepared.recipe.output_dir
    if named is not None and Path(named, "recipe.yaml").exists():
        yield told("output_folder.taken", named=named)
