"""The CPU as this process may use it: name, instruction sets, cores and memory, within control groups and affinity.

A container often sees the whole machine in /proc while its control group grants a part of it; threads and memory
beyond that part are throttled or killed, so the smaller number counts.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

# What training kernels choose by: the names are those of Linux's /proc/cpuinfo, on x86 and on arm.
INSTRUCTION_SETS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "bf16", "sve", "i8mm",
)
# The same on macOS, where sysctl names them differently.
SYSCTL_INSTRUCTION_SETS = {
    "hw.optional.avx2_0": "avx2", "hw.optional.fma": "fma", "hw.optional.avx512f": "avx512f",
    "hw.optional.AdvSIMD": "asimd", "hw.optional.arm.FEAT_BF16": "bf16", "hw.optional.arm.FEAT_I8MM": "i8mm",
}
CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Processor:
    """The CPU and its memory, as far as this process may use them."""

    name: str
    cores: int                               # physical
    instructions: tuple[str, ...]
    memory_bytes: int
    free_memory_bytes: int
    sources: dict[str, str]


def read_processor() -> Processor:
    """The CPU of this machine, with where each figure comes from."""
    description, described_by = _description()
    name = name_in(description)
    cores, cores_from = _cores()
    memory_bytes, free_bytes, memory_from = _memory()
    sources = {
        "name": described_by if name else "platform.processor()",
        "instructions": described_by, "cores": cores_from,
        "memory_bytes": memory_from, "free_memory_bytes": memory_from,
    }
    return Processor(name or platform.processor() or platform.machine(), cores, instructions_in(description),
                     memory_bytes, free_bytes, sources)


def name_in(description: str) -> str:
    """The product name in the text of /proc/cpuinfo or `sysctl -a`; empty where there is none (many arm kernels)."""
    return _fields(description).get("model name") or _fields(description).get("machdep.cpu.brand_string", "")


def instructions_in(description: str) -> tuple[str, ...]:
    """The instruction sets of INSTRUCTION_SETS that the text of /proc/cpuinfo or `sysctl -a` lists, in that order."""
    fields = _fields(description)
    present = set(fields.get("flags", "").split()) | set(fields.get("Features", "").split())
    present |= {name for key, name in SYSCTL_INSTRUCTION_SETS.items() if fields.get(key) == "1"}
    return tuple(name for name in INSTRUCTION_SETS if name in present)


def _fields(description: str) -> dict[str, str]:
    """`key : value` lines; the first of a key counts (cpuinfo repeats itself for each CPU)."""
    fields: dict[str, str] = {}
    for line in description.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _description() -> tuple[str, str]:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return cpuinfo.read_text(encoding="utf-8", errors="replace"), str(cpuinfo)
    if platform.system() == "Darwin":
        return subprocess.run(["sysctl", "-a"], capture_output=True, text=True, check=False).stdout, "sysctl -a"
    return "", f"not readable on {platform.system()}"


# ------------------------------------------------------------------------------------------------ cores


def _cores() -> tuple[int, str]:
    """Physical cores that this process may keep busy, and what limits them."""
    counted = {"psutil, physical cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        counted["CPU affinity of this process"] = physical_cores(os.sched_getaffinity(0))
    quota = cpu_quota(group_folders("cpu"))
    if quota is not None:
        counted["CPU quota of the control group"] = max(1, int(quota))
    source = min(counted, key=lambda name: counted[name])
    return counted[source], source


def physical_cores(cpus: Iterable[int], topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many physical cores the logical `cpus` lie on. A CPU without known siblings counts as a core."""
    cores = set()
    for cpu in cpus:
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.add(siblings.read_text().strip() if siblings.exists() else f"cpu{cpu}")
    return len(cores)


def cpu_quota(folders: Iterable[Path]) -> float | None:
    """The smallest CPU quota, in CPUs, that the control groups in `folders` set; None where none is set."""
    quotas = []
    for folder in folders:
        quota, period = (_text(folder / "cpu.max") or "max 100000").split()            # version 2
        if quota == "max":                                                             # or version 1
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "100000"
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


# ------------------------------------------------------------------------------------------------ memory


def _memory() -> tuple[int, int, str]:
    machine = psutil.virtual_memory()
    limit, free = memory_limit(group_folders("memory"))
    if limit is None or limit >= machine.total:
        return int(machine.total), int(machine.available), "psutil, of the machine"
    return limit, min(int(machine.available), free or 0), "memory limit of the control group"


def memory_limit(folders: Iterable[Path]) -> tuple[int | None, int | None]:
    """The smallest memory limit of the control groups in `folders` and the least that is free under one, in bytes.

    File cache that can be dropped (inactive_file) counts as free. None where no limit is set.
    """
    limits, free = [], []
    for folder in folders:
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or "max"
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or "0"
        if limit == "max":
            continue
        statistics = dict(line.split()[:2] for line in (_text(folder / "memory.stat") or "").splitlines())
        limits.append(int(limit))
        free.append(max(0, int(limit) - int(used) + int(statistics.get("inactive_file", 0))))
    return min(limits, default=None), min(free, default=None)


# ------------------------------------------------------------------------------------------------ control groups


def group_folders(controller: str, mount: Path = CONTROL_GROUPS, membership: str | None = None) -> list[Path]:
    """The folders of this process's control group for `controller`, up to the mount: each may set a limit.

    `membership` is the text of /proc/self/cgroup. Inside a container the path in it may not exist under the mount;
    then the mount itself is the group.
    """
    if membership is None:
        membership = _text(Path("/proc/self/cgroup")) or ""
    folders: list[Path] = []
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:                                          # version 2
            folders += _up_to_mount(mount, path) + _up_to_mount(mount / "unified", path)
        elif controller in controllers.split(","):                                     # version 1
            folders += _up_to_mount(mount / controllers, path) + _up_to_mount(mount / controller, path)
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _up_to_mount(mount: Path, path: str) -> list[Path]:
    parts = Path(path.lstrip("/")).parts
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _text(path: Path) -> str | None:
    """The text of a file, or None where it is absent or this process may not read it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
