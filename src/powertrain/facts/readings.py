"""What the machine and a process on it do at this moment, as far as the system tells. No torch is loaded."""

import contextlib
from collections.abc import Callable
from typing import Any

import psutil

from powertrain.facts.machine_watch import energy_j, taken_j
from powertrain.facts.nvidia import told_by_nvml
from powertrain.records.readings import GpuReading, Readings

MEANWHILE_S = 0.1            # over which use and power of the processor are means
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")          # psutil's names, by vendor
# bits of NVML's reasons for a lower clock (nvml.h, nvmlClocksEventReason), and what holds the GPU back
SLOWED_BY = ((0x40 | 0x20, "heat"), (0x80 | 0x08, "its power supply"), (0x04, "its power limit"))


def read_machine(pid: int) -> Readings:
    """Return the readings of now, with those of a process of this machine."""
    before_j, size_bytes, cores = energy_j(), None, None
    with contextlib.suppress(psutil.Error):  # it has ended
        process = psutil.Process(pid)
        cores = process.cpu_percent(MEANWHILE_S) / 100
        size_bytes = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    used_j = None if cores is None else taken_j(before_j, energy_j())
    found = getattr(psutil, "sensors_temperatures", dict[str, Any])()
    hottest_c = max((one.current for name in CPU_SENSORS for one in found.get(name, ())), default=None)
    return Readings(size_bytes, cores, hottest_c, None if used_j is None else used_j / MEANWHILE_S,
                    told_by_nvml(_gpus, ()))


def _gpus(nvml: Any) -> tuple[GpuReading, ...]:
    return tuple(_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(place)) for place in range(nvml.nvmlDeviceGetCount()))


def _gpu(nvml: Any, gpu: Any) -> GpuReading:
    def known(read: Callable[..., Any], *more: int) -> Any:
        try:
            return read(gpu, *more)
        except nvml.NVMLError:               # this kind of GPU does not tell it
            return None

    memory, use, power_mw = map(known, (nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetUtilizationRates,
                                        nvml.nvmlDeviceGetPowerUsage))
    reasons = known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    return GpuReading(nvml.nvmlDeviceGetName(gpu), memory and memory.used, memory and memory.total, use and use.gpu / 100,
                      known(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU), power_mw and power_mw / 1000,
                      next((words for bits, words in SLOWED_BY if reasons & bits), None))
