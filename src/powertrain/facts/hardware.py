"""The machine that trains: which device, how large, how fast, each with its source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from powertrain.facts.datasheet import datasheet
from powertrain.facts.measure import Peaks, cache_file, keep_peaks, kept_peaks, measurable_dtypes, measure_peaks
from powertrain.facts.processor import read_processor
from powertrain.machine import what_libraries_see
from powertrain.records import Hardware
from powertrain.records.json_files import replace_file


def read_hardware(cache: Path, *, measure: bool = True) -> Hardware:
    """The machine: CUDA if there is a GPU, else MPS, else the CPU, with its peaks.

    The peaks come from `cache`/hardware/<fingerprint>.json; where that has none, they are measured (a few seconds) and
    kept there, or left absent if not `measure`. A cache that cannot be written is no error: `sources` says so.
    """
    seen = _seen_by_torch(cache)
    hardware = _without_peaks(seen)
    hardware = replace(hardware, fingerprint=fingerprint(hardware, seen))
    dtypes = measurable_dtypes(hardware.device, hardware.compute_capability)
    file = cache_file(cache, hardware.fingerprint)
    kept = kept_peaks(file, dtypes)
    if kept is not None and (hardware.device != "cuda" or kept.host_link_bytes_per_s is not None):
        return _with_peaks(hardware, kept, f"measured earlier on this machine, {file}")
    if not measure:
        return hardware
    peaks = measure_peaks(hardware.device, dtypes)
    try:
        keep_peaks(file, peaks)
    except OSError as error:
        return _with_peaks(hardware, peaks, f"measured now; not kept, the cache cannot be written: {error}")
    return _with_peaks(hardware, peaks, f"measured now, kept in {file}")


def measure_again(cache: Path) -> Hardware:
    """The machine with its peaks measured now, whatever the cache held."""
    known = read_hardware(cache, measure=False)
    cache_file(cache, known.fingerprint).unlink(missing_ok=True)
    return read_hardware(cache)


@dataclass(frozen=True)
class Seen:
    """What torch says of the machine."""

    device: str
    torch: str                               # its version
    cuda: str | None                         # the version that it was built for
    threads: int                             # that it computes with on a CPU


def _seen_by_torch(cache: Path) -> Seen:
    """Return what torch sees. Where an earlier process saw a machine without a GPU, torch is not loaded for it again.

    The answer is kept in `cache`/hardware/torch-<digest of everything that it depends on>.json.
    """
    parts = (importlib.metadata.version("torch"), sys.prefix, *what_libraries_see())
    file = cache / "hardware" / f"torch-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
    if "torch" in sys.modules:               # this process may have set another number of threads: neither read nor keep
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
    return Seen(device, torch.__version__, torch.version.cuda, torch.get_num_threads())


def fingerprint(hardware: Hardware, seen: Seen | None = None) -> str:
    """sha256 of what a measurement depends on: machine, torch, CUDA and the number of threads.

    Memory counts in whole GiB: what a virtual machine reports varies by some MiB between boots.
    """
    seen = seen or _ask_torch()
    parts = {
        "name": hardware.name, "device": hardware.device, "cores": hardware.cores,
        "memory_gib": round(hardware.memory_bytes / 2**30),
        # one that came to be known later, and that no peak depends on: what was measured before stays valid
        "instructions": [name for name in hardware.instructions if name != "avx_vnni"],
        "torch": seen.torch, "cuda": seen.cuda, "threads": seen.threads,
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
    return replace(processor, default_threads=seen.threads, sources={
        **processor.sources, "device": "torch: neither CUDA nor MPS is available", "default_threads": "torch.get_num_threads"})


def _cuda(processor: Hardware) -> Hardware:
    import torch

    name = torch.cuda.get_device_name(0)
    free_bytes, memory_bytes = torch.cuda.mem_get_info(0)
    row = datasheet(name)
    sources = {
        **processor.sources, "name": "torch.cuda.get_device_name", "device": "torch.cuda.is_available",
        "memory_bytes": "torch.cuda.mem_get_info", "free_memory_bytes": "torch.cuda.mem_get_info",
        "compute_capability": "torch.cuda.get_device_capability", "devices": "torch.cuda.device_count",
        "host_free_memory_bytes": processor.sources["free_memory_bytes"],
    }
    if row is not None:
        sources["datasheet_flops_per_s"] = row.link
    return replace(
        processor, name=name, device="cuda", memory_bytes=memory_bytes, free_memory_bytes=free_bytes,
        compute_capability=torch.cuda.get_device_capability(0), devices=torch.cuda.device_count(),
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
