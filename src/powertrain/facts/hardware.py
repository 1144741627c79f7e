"""The machine that trains: which device, how large, how fast, each figure with its source.

datasheets.csv holds the dense peaks that the maker states for exactly that product, by the name that torch reports, in GB/s and
TFLOP/s, with the link. A GPU without a row is unknown: no figure is taken from a similar product. FLOP/s are without sparsity;
where a datasheet states only the sparse figure, the row has half of it. An MI250, which torch sees as two GPUs, has half of its
package's figures. Tensor figures are those with fp32 accumulation, which GeForce runs at half the rate of fp16 accumulation.
Of a Tesla T4 NVIDIA states 300 GB/s (the datasheet) and 320 GB/s (other pages): the row has the lower.
"""

import csv
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache as cached
from pathlib import Path

from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.measure import Peaks, cache_file, keep_peaks, kept_peaks, measurable_dtypes, measure_peaks
from powertrain.facts.nvidia import check_code, idle_gpu
from powertrain.machine import gpu_devices, usable_cores, usable_memory, what_libraries_see
from powertrain.records import Hardware, WrongUse
from powertrain.records.json_files import replace_file


def read_hardware(cache: Path, *, measure: bool = True) -> Hardware:
    """Return the machine: CUDA if there is a GPU, else MPS, else the CPU, with its peaks.

    The peaks come from `cache`/hardware/<fingerprint>.json; where that has none, they are measured (a few seconds) and
    kept there, or left absent if not `measure`. Peaks of a CPU that other processes kept busy meanwhile are used and not
    kept, so that the next command measures again; `sources` says so. A cache that cannot be written is no error.
    """
    seen = _seen_by_torch(cache)
    hardware = _without_peaks(seen)
    hardware = replace(hardware, fingerprint=fingerprint(hardware, seen))
    dtypes = measurable_dtypes(hardware.device, hardware.compute_capability, hardware.architecture)
    file = cache_file(cache, hardware.fingerprint)
    kept = kept_peaks(file, dtypes)
    if kept is not None and (hardware.device != "cuda" or kept.host_link_bytes_per_s is not None):
        return _with_peaks(hardware, kept, f"measured earlier on this machine, {file}")
    if not measure:
        return hardware
    with MachineWatch() as watch:
        peaks = measure_peaks(hardware.device, dtypes)
    if hardware.device == "cpu" and (disturbed := watch.seen.disturbed_by):
        return _with_peaks(hardware, peaks, f"measured now while {disturbed}; not cached")
    try:
        keep_peaks(file, peaks)
    except OSError as error:
        return _with_peaks(hardware, peaks, f"measured now; not cached, because the cache cannot be written: {error}")
    return _with_peaks(hardware, peaks, f"measured now, kept in {file}")


def shared_by(hardware: Hardware, processes: int, here: int) -> Hardware:
    """Return what one of a run's `processes` has of this machine, on which `here` of them run.

    GPUs are not divided: each process has one of its own. Raises WrongUse where there are fewer GPUs or cores than processes.
    """
    devices, kind = (hardware.devices, "GPU") if hardware.device != "cpu" else (hardware.cores, "core")
    if here > max(1, devices):
        raise WrongUse(f"{here} processes are more than the {devices} {kind}{'s' * (devices != 1)} of this machine; use "
                       f"--processes {devices}")
    if processes == 1:
        return hardware
    found = replace(hardware, processes=processes, nodes=-(-processes // here), cores=max(1, hardware.cores // here))
    if hardware.device == "cuda":
        host_bytes = hardware.host_free_memory_bytes
        return replace(found, host_free_memory_bytes=None if host_bytes is None else host_bytes // here)
    bandwidth = hardware.bandwidth_bytes_per_s
    return replace(found, free_memory_bytes=hardware.free_memory_bytes // here,
                   peak_flops_per_s={dtype: peak / here for dtype, peak in hardware.peak_flops_per_s.items()},
                   bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / here)


def forget_peaks(cache: Path) -> None:
    """Delete this machine's peaks from the cache, so that the next `read_hardware` measures them."""
    cache_file(cache, read_hardware(cache, measure=False).fingerprint).unlink(missing_ok=True)


@dataclass(frozen=True)
class Seen:
    """The machine as torch reports it."""

    device: str
    torch: str                               # its version
    cuda: str | None                         # the version that it was built for
    threads: int                             # that it computes with on a CPU
    hip: str | None = None                   # of AMD's ROCm, where it was built for that


def _seen_by_torch(cache: Path) -> Seen:
    """Return what torch sees. Where an earlier process saw a machine without a GPU, torch is not loaded for it again.

    Where a driver has found a GPU, torch is asked each time: a new driver may show it to torch. Else the answer is kept in
    `cache`/hardware/torch-<digest of everything that it depends on>.json.
    """
    parts = (importlib.metadata.version("torch"), sys.prefix, *what_libraries_see())
    file = cache / "hardware" / f"torch-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
    if "torch" in sys.modules or gpu_devices():  # with torch, this process may have set another number of threads
        return _ask_torch()
    with suppress(OSError, ValueError, TypeError):           # nothing is kept, or another version kept it: ask torch
        return Seen(**json.loads(file.read_text(encoding="utf-8")))
    seen = _ask_torch()
    if seen.device == "cpu":
        with suppress(OSError):              # the next process loads torch again
            replace_file(file, json.dumps(asdict(seen)).encode())
    return seen


def _ask_torch() -> Seen:
    import torch

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return Seen(device, torch.__version__, torch.version.cuda, torch.get_num_threads(), torch.version.hip)


def fingerprint(hardware: Hardware, seen: Seen | None = None) -> str:
    """Return the sha256 of all that a measurement depends on: machine, torch, CUDA and the number of threads.

    Memory counts in whole GiB: what a virtual machine reports varies by some MiB between boots.
    """
    seen = seen or _ask_torch()
    parts = {
        "name": hardware.name, "device": hardware.device, "cores": hardware.cores,
        "memory_gib": round(hardware.memory_bytes / 2**30),
        # avx_vnni was added later and no peak depends on it: earlier measurements stay valid
        "instructions": [name for name in hardware.instructions if name != "avx_vnni"],
        "torch": seen.torch, "cuda": seen.cuda, "threads": seen.threads, **({"hip": seen.hip} if seen.hip else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _with_peaks(hardware: Hardware, peaks: Peaks, source: str) -> Hardware:
    sources = {**hardware.sources, "peak_flops_per_s": source, "bandwidth_bytes_per_s": source}
    if peaks.host_link_bytes_per_s is not None:
        sources["host_link_bytes_per_s"] = source
    return replace(
        hardware, peak_flops_per_s=peaks.flops_per_s, bandwidth_bytes_per_s=peaks.bandwidth_bytes_per_s,
        host_link_bytes_per_s=peaks.host_link_bytes_per_s, sources=sources)


def _without_peaks(seen: Seen) -> Hardware:
    processor = read_processor()
    if seen.device == "cuda":
        return _cuda(processor)
    if seen.device == "mps":
        return _mps(processor)
    return replace(processor, default_threads=seen.threads, idle_gpu=idle_gpu(seen.torch, seen.cuda, seen.hip), sources={
        **processor.sources, "device": "torch: neither CUDA nor MPS is available", "default_threads": "torch.get_num_threads",
        "idle_gpu": "the GPU's driver"})


def _cuda(processor: Hardware) -> Hardware:
    """Return the GPUs that torch sees. Raises WrongUse where this build of torch has no code for one of them."""
    import torch

    name = torch.cuda.get_device_name(0)
    free_bytes, memory_bytes = torch.cuda.mem_get_info(0)
    row = datasheet(name)
    sources = {
        **processor.sources, "name": "torch.cuda.get_device_name", "device": "torch.cuda.is_available",
        "memory_bytes": "torch.cuda.mem_get_info", "free_memory_bytes": "torch.cuda.mem_get_info",
        "devices": "torch.cuda.device_count",
        "host_free_memory_bytes": processor.sources["free_memory_bytes"],
    }
    if row is not None:
        sources["datasheet_flops_per_s"] = row.link
    capability, architecture = None, ""
    if torch.version.hip:                    # get_device_capability would give gfx90a as 9.0, as if it were a Hopper
        architecture = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        sources["architecture"] = "torch.cuda.get_device_properties"
    else:
        capability, sources["compute_capability"] = torch.cuda.get_device_capability(0), "torch.cuda.get_device_capability"
        for index in range(torch.cuda.device_count()):
            check_code(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), torch.cuda.get_arch_list(),
                       torch.__version__, torch.version.cuda or "0")
    return replace(
        processor, name=name, device="cuda", memory_bytes=memory_bytes, free_memory_bytes=free_bytes,
        compute_capability=capability, architecture=architecture, devices=torch.cuda.device_count(),
        host_free_memory_bytes=processor.free_memory_bytes, datasheet_flops_per_s=dict(row.flops_per_s) if row else {},
        sources=sources)


def _mps(processor: Hardware) -> Hardware:
    """Return an Apple GPU: torch knows no name of it, and it shares the machine's memory up to a limit that Metal sets."""
    import torch

    memory_bytes = torch.mps.recommended_max_memory()
    free_bytes = min(processor.free_memory_bytes, memory_bytes - torch.mps.driver_allocated_memory())
    return replace(processor, device="mps", memory_bytes=memory_bytes, free_memory_bytes=free_bytes, sources={
        **processor.sources, "device": "torch.backends.mps.is_available",
        "memory_bytes": "torch.mps.recommended_max_memory",
        "free_memory_bytes": "the smaller of the machine's free memory and the memory that Metal leaves this process"})


# ------------------------------------------------------------------------------------------------ the processor

# Training kernels choose by these: names of Linux's /proc/cpuinfo, on x86 and on arm.
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
    """Return the product name in the text of /proc/cpuinfo or `sysctl -a`; empty where there is none (many arm kernels)."""
    return _fields(description).get("model name") or _fields(description).get("machdep.cpu.brand_string", "")


def instructions_in(description: str) -> tuple[str, ...]:
    """Return the instruction sets of INSTRUCTION_SETS that the text of /proc/cpuinfo or `sysctl -a` lists, in that order."""
    fields = _fields(description)
    present = set(fields.get("flags", "").split()) | set(fields.get("Features", "").split())
    present |= {name for key, name in SYSCTL_INSTRUCTION_SETS.items() if fields.get(key) == "1"}
    return tuple(name for name in INSTRUCTION_SETS if name in present)


def _fields(description: str) -> dict[str, str]:
    """Read `key : value` lines; the first of a key counts (cpuinfo repeats itself for each CPU)."""
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


# ------------------------------------------------------------------------------------------------ datasheets

DTYPES = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Datasheet:
    """The maker's figures for one product."""

    flops_per_s: Mapping[str, float]         # dense, by DTYPES; a dtype that the datasheet does not state is absent
    bandwidth_bytes_per_s: float | None      # of the device memory
    link: str


def datasheet(name: str) -> Datasheet | None:
    """Return the row for the GPU that torch calls `name`, or None if no row is for exactly that product."""
    return datasheets().get(_normalised(name))


@cached
def datasheets() -> Mapping[str, Datasheet]:
    """Return all rows by the product's normalised name."""
    with Path(__file__).with_name("datasheets.csv").open(encoding="utf-8", newline="") as file:
        return {_normalised(row["name"]): Datasheet({dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]},
                                                    float(row["gb_per_s"]) * 1e9 if row["gb_per_s"] else None, row["link"])
                for row in csv.DictReader(file)}


def _normalised(name: str) -> str:
    """Return the name without case, repeated spaces and the leading vendor word; the rest tells products apart."""
    words = name.lower().split()
    return " ".join(words[1:] if words[:1] in (["nvidia"], ["tesla"], ["amd"]) else words)
