"""The CPU as this process may use it: name, instruction sets, and what machine.py counts of its cores and memory."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from powertrain.machine import usable_cores, usable_memory
from powertrain.records import Hardware

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


def read_processor() -> Hardware:
    """Return the CPU of this machine and its memory as far as this process may use them, with the source of each figure."""
    description, described_by = _description()
    name = name_in(description)
    cores, cores_from = usable_cores()
    memory_bytes, free_bytes, memory_from = usable_memory()
    sources = {
        "name": described_by if name else "platform.processor()", "instructions": described_by, "cores": cores_from,
        "memory_bytes": memory_from, "free_memory_bytes": memory_from,
    }
    return Hardware(name or platform.processor() or platform.machine(), "cpu", cores, memory_bytes, free_bytes,
                    instructions_in(description), sources=sources)


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
