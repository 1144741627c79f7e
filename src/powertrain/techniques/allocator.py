"""Allocator: let freed memory be reused by the next step instead of going back to the system."""

import ctypes
import platform
from dataclasses import dataclass, replace
from typing import ClassVar

from powertrain.models.kernels import build, pool
from powertrain.records import Effect, Hardware, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_KEPT_BYTES = 1 << 30                 # blocks up to this stay in the heap (mallopt takes a C int)
STUDY = "2026-11-21_ablation-docstrings"
POOL_GAIN, POOL_STUDY, POOL_COMPILE_S = (0.97, 1.02), "2026-11-27_pool-docstrings", 1.5
WORTH = (0.9, 0.9)           # of a step's time: what holding less memory is taken to be worth, beside the time to compile
CUDA_SETTING = "expandable_segments:True"
READ_BACK_SINCE = (2, 12)                    # the first torch that tells its allocator's settings
FRAGILE = {"microsoft": "on WSL2 (pytorch#192330)", "tegra": "with the driver of a Jetson"}      # by the kernel's release


@dataclass(frozen=True)
class Allocator(Technique):
    """A step frees and takes the same large blocks again and again.

    On a CPU our own pool keeps them for the next request of about their size, up to a quarter and 256 MiB more than the most
    that tensors held at once. Without it torch asks malloc: glibc maps blocks over 32 MiB afresh each time, and every page of
    them is then zeroed by the kernel at first touch; before 2.38 it does not find the holes again that aligned blocks leave, so
    that a process grows to several times what its tensors hold. `glibc` raises its thresholds, which keeps large blocks in its
    heap.
    On CUDA, expandable segments let blocks of changing size share one growing range, which avoids fragmentation. None of
    these changes a number.
    """

    kind: str = "pool"                       # or "glibc", or "cuda"

    name = "allocator"
    does = "keeps freed memory for the next step"
    choices: ClassVar = {"kind": ("pool", "glibc", "cuda")}
    exactness = Exactness.BITWISE
    touches = frozenset({"runtime"})
    source = "glibc manual, mallopt, and its bug 14581; PyTorch notes on CUDA memory management (expandable_segments)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        if run.hardware.device == "cuda":
            if (why := _why_not_expandable(run.hardware)) is not None:
                return cls.refuse(Why.HARDWARE_LACKS, why)
            if run.software.release("torch") < READ_BACK_SINCE:
                return cls.refuse(Why.DOES_NOT_APPLY, f"torch {run.software.versions.get('torch', '')} does not tell which "
                                  "settings its allocator has, so nothing could confirm this one; torch 2.12 does")
            return cls("cuda").on("expandable segments avoid gaps between blocks whose size changes",
                                  Effect((0.98, 1.01), 0, basis="guess: not measured yet", guessed=True))
        if run.hardware.device != "cpu" or platform.system() == "Windows":
            return cls.refuse(Why.HARDWARE_LACKS, f"this needs a CPU under Linux or macOS, or a CUDA GPU; here "
                                                  f"{platform.system()} allocates memory for {run.hardware.device!r}")
        if (why_not := _why_no_pool(run)) is None:
            return cls("pool").on("each pass frees and allocates the same activations; a pool of our own hands them out again, "
                                  "and holds a quarter and 256 MiB more than they took at most",
                                  Effect(POOL_GAIN, 0, basis=f"study: {POOL_STUDY}"))
        if not _has_mallinfo2():
            return cls.refuse(Why.PART_MISSING, f"glibc is no 2.33 or newer, and the pool is not taken: {why_not}")
        return cls("glibc").on("each pass frees and allocates the same activations; memory that goes back to the system "
                               "is zeroed again", Effect((0.94, 1.03), 0, basis=f"study: {STUDY}"))

    def compiles(self) -> bool:
        return self.kind == "pool"

    def build(self) -> None:
        if self.compiles():
            self.build_kernels((build.POOL,), "the pool", "techniques.allocator.kind=glibc needs no compiler",
                               replace(self, kind="glibc") if _has_mallinfo2() else None)

    def apply(self, setup: Setup) -> Setup:
        self.build()
        return replace(setup, runtime=(*setup.runtime, _SETTINGS[self.kind]))

    def confirm(self, setup: Setup) -> None:
        if _SETTINGS[self.kind] not in setup.runtime:
            raise NotApplied(f"allocator: the run does not set {self.kind!r}")
        if self.kind == "cuda" and CUDA_SETTING not in _cuda_settings():
            raise NotApplied(f"allocator: torch's allocator has the settings {_cuda_settings()!r}, without {CUDA_SETTING}")
        if self.kind == "pool" and not pool.is_installed():
            raise NotApplied("allocator: torch takes memory from another allocator than the pool")
        if self.kind == "glibc" and _maps_large_blocks():
            raise NotApplied("allocator: a large block is still mapped afresh each time; is another malloc preloaded?")


def _why_no_pool(run: PlannedRun) -> str | None:
    """Return why the pool is not taken, or None. Nothing is compiled."""
    if "c++ compiler" in run.software.missing:
        return f"there is no C++ compiler ({run.software.missing['c++ compiler']})"
    if build.is_built(build.POOL):
        return None
    return None if run.bargain(WORTH, POOL_COMPILE_S)[0] else "the run is too short to compile it for"


def _has_mallinfo2() -> bool:
    return platform.system() == "Linux" and hasattr(ctypes.CDLL(None), "mallinfo2")


def _keep_pages() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_KEPT_BYTES - 1)


def _expand_segments() -> None:
    import torch

    torch._C._accelerator_setAllocatorSettings(CUDA_SETTING)


def _cuda_settings() -> str:
    """Return the settings of torch's allocator, as it gives them back; "" where torch is older than READ_BACK_SINCE."""
    import torch

    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return "" if tell is None else str(tell())


def _why_not_expandable(hardware: Hardware) -> str | None:
    """Return why expandable segments are not used with the driver of this machine, or None."""
    if hardware.architecture:
        return "a crash with expandable segments was reported on an AMD GPU (pytorch#187343)"
    if hardware.basis != "measured":         # another machine
        return None
    if platform.system() == "Windows":
        return "memory that runs out leaves a process with expandable segments broken on Windows (pytorch#188008)"
    return next((f"expandable segments can fail at the first allocation {where}" for word, where in FRAGILE.items()
                 if word in platform.release().lower()), None)


_SETTINGS = {"pool": pool.install, "glibc": _keep_pages, "cuda": _expand_segments}


class _Mallinfo2(ctypes.Structure):
    """glibc's account of its heap (malloc.h, since 2.33); `hblks` counts the blocks that are mapped on their own."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"))


def _maps_large_blocks(probe_bytes: int = 256 << 20) -> bool:
    """Return whether a large block is still mapped on its own, so that freeing it gives its pages back."""
    import torch

    count = ctypes.CDLL(None).mallinfo2
    count.restype = _Mallinfo2
    before = count().hblks
    block = torch.empty(probe_bytes, dtype=torch.uint8)
    mapped = bool(count().hblks > before)
    del block
    return mapped
