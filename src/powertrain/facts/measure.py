"""Measured peaks of this device: GEMM speed by dtype and copy bandwidth, measured once and kept in a cache.

Shares of a step are quoted against these, not against the datasheet: cards of one name differ by power and cooling,
and a virtual machine reaches only what its host leaves it. A peak is the best of all repeats, because interference
only ever makes a repeat slower.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from powertrain.records.json_files import replace_file

TORCH_DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Edge of the square matrices, small to large. The first is so small that even a bf16 GEMM without hardware support
# (about 1 GFLOP/s) ends in milliseconds; the larger ones are tried as far as the budget reaches.
GEMM_EDGES = {"cpu": (128, 256, 512, 1024, 2048), "mps": (512, 1024, 2048, 4096),
              "cuda": (512, 1024, 2048, 4096, 8192)}
GEMM_BUDGET_S = 1.0                          # per dtype
COPY_BUDGET_S = 0.5
COPY_BYTES = 256 * 2**20                     # per buffer: beyond the last-level cache of most machines
LINK_BYTES = 64 * 2**20                      # about what one tensor of a block takes
REPEATS = 8                                  # per matrix size, at most


@dataclass(frozen=True)
class Peaks:
    """Measured limits of one device."""

    flops_per_s: Mapping[str, float]         # dense GEMM, by "fp32", "tf32", "bf16", "fp16"
    bandwidth_bytes_per_s: float             # copy: bytes read + bytes written
    host_link_bytes_per_s: float | None = None           # of a GPU; see host_link_bytes_per_s


def measurable_dtypes(device: str, compute_capability: tuple[int, int] | None, architecture: str = "") -> tuple[str, ...]:
    """Return the dtypes whose GEMM peak means something on this device.

    An NVIDIA GPU below capability 8.0 has neither tf32 nor bf16 units: torch would emulate them. On an AMD GPU, which has an
    `architecture`, nobody has tried tf32.
    """
    if architecture:
        return ("fp32", "bf16", "fp16")
    if device != "cuda":
        return ("fp32", "bf16", "fp16") if device == "mps" else ("fp32", "bf16")
    recent = compute_capability is not None and compute_capability >= (8, 0)
    return ("fp32", "tf32", "bf16", "fp16") if recent else ("fp32", "fp16")


def measure_peaks(device: str, dtypes: tuple[str, ...] = ("fp32", "bf16"), *, gemm_budget_s: float = GEMM_BUDGET_S,
                  copy_bytes: int = COPY_BYTES) -> Peaks:
    """Measure the GEMM peak of each of `dtypes` and the copy bandwidths of `device`; about a second per dtype."""
    flops_per_s = {dtype: gemm_flops_per_s(device, dtype, budget_s=gemm_budget_s) for dtype in dtypes}
    link = host_link_bytes_per_s(device) if device == "cuda" else None
    return Peaks(flops_per_s, copy_bytes_per_s(device, copy_bytes), link)


def gemm_flops_per_s(device: str, dtype: str, *, budget_s: float = GEMM_BUDGET_S) -> float:
    """Measure the best FLOP/s of square products x @ w.T, from small to large until `budget_s` would be passed.

    A size is tried only if one product of it, at the best rate so far, fits twice in what is left of the budget
    (twice: the warm-up counts too). So a slow machine stays within about the budget and never meets the large sizes.
    """
    import torch

    until = time.perf_counter() + budget_s
    best, kind = 0.0, getattr(torch, TORCH_DTYPES[dtype])
    with torch.inference_mode(), _fp32_precision("high" if dtype == "tf32" else "highest"):
        for edge in GEMM_EDGES[device]:
            flops = 2.0 * edge**3
            if best and 2 * flops / best > until - time.perf_counter():
                break
            rows = torch.randn(edge, edge, device=device).to(kind)
            weight = torch.randn(edge, edge, device=device).to(kind)
            product = torch.empty_like(rows)
            seconds = _best_s(partial(torch.mm, rows, weight.t(), out=product), device, until)
            best = max(best, flops / seconds)
    return best


def copy_bytes_per_s(device: str, buffer_bytes: int = COPY_BYTES) -> float:
    """Measure bytes read plus bytes written per second by a copy between two buffers of `buffer_bytes`."""
    import torch

    source = torch.ones(buffer_bytes // 4, device=device)          # float32
    target = torch.zeros_like(source)
    seconds = _best_s(lambda: target.copy_(source), device, time.perf_counter() + COPY_BUDGET_S)
    return 2.0 * source.numel() * source.element_size() / seconds


def host_link_bytes_per_s(device: str, buffer_bytes: int = LINK_BYTES) -> float:
    """Measure bytes per second between a GPU and its host's pinned memory, the slower way; no datasheet knows the slot."""
    import torch

    there = torch.ones(buffer_bytes, dtype=torch.uint8, device=device)
    here = torch.ones(buffer_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    ways = [lambda: here.copy_(there, non_blocking=True), lambda: there.copy_(here, non_blocking=True)]
    return buffer_bytes / max(_best_s(way, device, time.perf_counter() + COPY_BUDGET_S) for way in ways)


def _best_s(work: Callable[[], object], device: str, until: float) -> float:
    """Return the fastest of at most REPEATS runs of `work` after one warm-up, at least one, ending about at `until`."""
    seconds_of(work, device)
    seconds = [seconds_of(work, device)]
    while len(seconds) < REPEATS and time.perf_counter() + seconds[-1] < until:
        seconds.append(seconds_of(work, device))
    return max(min(seconds), 1e-9)


def seconds_of(work: Callable[[], object], device: str, times: int = 1) -> float:
    """Return the seconds of one of `times` calls in a row; the device is idle before and after."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return (time.perf_counter() - began) / times


def wait_for(device: str) -> None:
    """Wait until the device ("cpu", "cuda" or "mps") has finished its queue; the CPU always has."""
    if device == "cpu":
        return
    import torch

    getattr(torch, device).synchronize()


@contextlib.contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Compute fp32 products in full ("highest") or in tf32 ("high"), whatever the process has set; put back afterwards."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------------------------------------------ cache


def cache_file(cache: Path, fingerprint: str) -> Path:
    """Return where the peaks of the machine with this fingerprint are kept."""
    return cache / "hardware" / f"{fingerprint}.json"


def kept_peaks(file: Path, dtypes: tuple[str, ...]) -> Peaks | None:
    """Return the peaks in `file`; None where it is absent, unreadable, or lacks a figure for one of `dtypes`."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        flops_per_s = {dtype: float(kept["peak_flops_per_s"][dtype]) for dtype in dtypes}
        bandwidth = float(kept["bandwidth_bytes_per_s"])
        link = None if kept.get("host_link_bytes_per_s") is None else float(kept["host_link_bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    figures = [*flops_per_s.values(), bandwidth, *([] if link is None else [link])]
    return Peaks(flops_per_s, bandwidth, link) if all(math.isfinite(f) and f > 0 for f in figures) else None


def keep_peaks(file: Path, peaks: Peaks) -> None:
    """Write `peaks` to `file` whole or not at all. Raises OSError where the cache cannot be written."""
    content = {"peak_flops_per_s": dict(peaks.flops_per_s), "bandwidth_bytes_per_s": peaks.bandwidth_bytes_per_s,
               "host_link_bytes_per_s": peaks.host_link_bytes_per_s,
               "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    replace_file(file, json.dumps(content, indent=2).encode() + b"\n")
