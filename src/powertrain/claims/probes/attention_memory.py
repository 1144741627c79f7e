"""How attention's memory grows with the length of a document: the exponent, from the real peaks of a pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from powertrain.claims.probes.attention_kernels import KERNELS, one_pass
from powertrain.claims.probes.probe import Context, Measured, fastest_device, one_of
from powertrain.claims.probes.process import apart
from powertrain.evidence.stats import interval
from powertrain.training.ledger import MemoryLedger


def measure(context: Context, *, a: str = "eager", b: str = "sdpa", lengths: Sequence[int] = (256, 512, 1024, 2048),
            heads: int = 4, head_width: int = 64) -> Measured:
    """The exponent p of arm b, whose bytes grow as length^p from one of `lengths` to the next; 1 is linear, 2 quadratic.

    One document, forward and backward; what is counted is over what stood before. Detail: `exponent_a`, and the bytes.
    """
    for name, kernel in (("a", a), ("b", b)):
        one_of(name, kernel, tuple(KERNELS))
    found = {kernel: apart(_peaks, kernel, lengths, heads, head_width) for kernel in (a, b)}
    exponents = {kernel: exponents_of(peaks) for kernel, peaks in found.items()}
    return Measured(interval(exponents[b]), "as an exponent of the length", a, b,
                    {"exponent_a": vars(interval(exponents[a])),
                     "peak_bytes": {kernel: {str(length): peak for length, peak in peaks.items()}
                                    for kernel, peaks in found.items()}})


def _peaks(kernel: str, lengths: Sequence[int], heads: int, width: int) -> dict[int, int]:
    device = fastest_device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = {}
    for length in lengths:
        work = one_pass(KERNELS[kernel], (length,), heads, heads, width, dtype, device)
        work()                               # once, for what a library keeps
        with MemoryLedger(device, standing=0) as ledger:
            work()
        found[length] = ledger.peak_bytes
    return found


def exponents_of(peaks: Mapping[int, float]) -> list[float]:
    """From each length to the next: the slope of log bytes over log length."""
    points = sorted(peaks.items())
    return [math.log(after / before) / math.log(longer / shorter)
            for (shorter, before), (longer, after) in itertools.pairwise(points)]
