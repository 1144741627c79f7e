"""What a diagnosis looks at besides facts, recipe and plan: the machine's load, its disk, and what is shown to torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from powertrain.diagnosis.observed import Observed
from powertrain.diagnosis.pauses import run_disk
from powertrain.run.prepare import Prepared

NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))     # there where a driver has found a GPU


@dataclass(frozen=True)
class Machine:
    """As it is now."""

    load: float                              # processes that want to compute, on average of the last minute
    threads: int                             # that torch computes with, if no technique says otherwise
    disk: Path                               # where the run would lie, as far as it is there already
    disk_free_bytes: int
    swap_used_bytes: int = 0
    on_battery: bool = False
    has_nvidia_driver: bool = False
    torch_has_cuda: bool = False             # it was built for it


@dataclass(frozen=True)
class Situation:
    """All that a check may look at."""

    prepared: Prepared
    machine: Machine
    refused_pins: tuple[str, ...] = ()       # techniques that the recipe asks for and that cannot be, with the reason
    observed: Observed | None = field(default=None)      # None: before the probe, or without one


def look_around(prepared: Prepared) -> Machine:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    disk = run_disk(prepared.recipe.output_dir)
    return Machine(
        load=psutil.getloadavg()[0], threads=torch.get_num_threads(), disk=disk, disk_free_bytes=shutil.disk_usage(disk).free,
        swap_used_bytes=int(psutil.swap_memory().used), on_battery=battery is not None and battery.power_plugged is False,
        has_nvidia_driver=any(path.exists() for path in NVIDIA), torch_has_cuda=torch.version.cuda is not None)
