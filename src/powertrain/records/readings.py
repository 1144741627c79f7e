"""What a machine says of itself and of a process at one moment. None is a figure that it does not give."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuReading:
    name: str
    used_bytes: int | None = None
    memory_bytes: int | None = None
    busy_share: float | None = None          # of the last moments, in which a kernel ran
    temperature_c: float | None = None
    power_w: float | None = None
    slowed_by: str | None = None             # what lowers its clock: heat, its power supply or its power limit


@dataclass(frozen=True)
class Readings:
    process_bytes: int | None = None         # of the process and those that it started
    cores: float | None = None               # that the process keeps busy
    temperature_c: float | None = None       # of the processor
    power_w: float | None = None             # of the processor
    gpus: tuple[GpuReading, ...] = ()
