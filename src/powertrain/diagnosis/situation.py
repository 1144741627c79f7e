"""The facts that a check may read: the prepared run, the machine's present state, and the steps that a probe has watched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from powertrain.diagnosis.observed import Observed
from powertrain.records.plan import PinError
from powertrain.run.folder import RUNS
from powertrain.run.prepare import Prepared

NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))     # these exist where a driver has found a GPU


@dataclass(frozen=True)
class Machine:
    """The state of this machine at one moment."""

    load: float                              # processes that want a core, averaged over the last minute
    threads: int                             # torch's own choice, used if no technique sets another number
    disk: Path                               # the nearest existing folder of the run's folder
    disk_free_bytes: int
    swap_used_bytes: int = 0
    on_battery: bool = False
    has_nvidia_driver: bool = False
    torch_has_cuda: bool = False             # torch was built with CUDA


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
        swap_used_bytes=int(psutil.swap_memory().used), on_battery=battery is not None and battery.power_plugged is False,
        has_nvidia_driver=any(path.exists() for path in NVIDIA), torch_has_cuda=torch.version.cuda is not None)
