"""How long a step takes: the floor that the machine sets, and the interval to expect above it.

The floor is what no software beats at the measured peaks. The expectation starts from the ideal step, the sum of its
parts at those peaks (products, bytes between them, operator calls, random numbers), and divides it by the share of the
ideal that such work reaches: as finished runs on this very machine did, or else as a study found for this kind of
device, which is kept in efficiencies.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from powertrain.cost.work import Work
from powertrain.records import Hardware, UnknownFact

COMPUTE = "compute"
BANDWIDTH = "memory bandwidth"

OPERATOR_S = {"cpu": 10e-6, "cuda": 5e-6}    # guess: one operator call or kernel launch of eager PyTorch
DROPOUT_ELEMENT_S = {"cpu": 5e-9}            # guess: one random number and its use, forward and backward; on a GPU it hides
MOVED_SHARE = {"cpu": 0.5}                   # guess: of the bytes between products; caches keep the rest. A GPU moves them all
LARGE_TOKENS = 1024                          # of a pass: from here on, products count as large ...
LARGE_WIDTH = 256                            # ... if the model is also this wide. guess: until a study says otherwise
TABLE = Path(__file__).with_name("efficiencies.json")
NARROWEST = 0.1                              # an interval reaches at least so far to either side: no run repeats exactly


@dataclass(frozen=True)
class Efficiency:
    """The share of the ideal step's speed that such work reaches, from the worst case to the best."""

    low: float
    high: float
    basis: str


def efficiency(hardware: Hardware, dtype: str, size: str, kind: str = "") -> Efficiency:
    """What to expect of this machine, with its basis: its own runs of the same kind of work, else the table."""
    seen = hardware.speeds.get(kind)
    if seen is not None:
        low, high = min(seen.low, seen.median * (1 - NARROWEST)), max(seen.high, seen.median * (1 + NARROWEST))
        return Efficiency(low, high, f"{seen.runs} run{'s' if seen.runs > 1 else ''} on this machine")
    rows = _table()
    for key in ((hardware.device, dtype, size), (hardware.device, "any", size), ("cuda", "any", size)):
        if key in rows:
            row = rows[key]
            return Efficiency(row["low"], row["high"], row["basis"])
    raise AssertionError(f"no efficiency for {size} products on {hardware.device}")


@cache
def _table() -> Mapping[tuple[str, str, str], Any]:
    return {(row["device"], row["dtype"], row["size"]): row
            for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"]}


def size_class(pass_tokens: int, width: int) -> str:
    """"large" where products fill the device, "small" where they do not."""
    return "large" if pass_tokens >= LARGE_TOKENS and width >= LARGE_WIDTH else "small"


def step_floor(work: Work, hardware: Hardware) -> tuple[float, str]:
    """Seconds one step takes if nothing but the slower of compute and memory limits it, and which of the two that is.

    Compute: the model's FLOPs at the measured GEMM peak. Memory: the operands of the matrix products and the
    optimizer's state, at the copy bandwidth; what fusion can avoid is not counted. A model small enough to stay in a
    CPU's caches can beat the memory side. Raises UnknownFact if `hardware` has no peak for the work's dtype, or no
    bandwidth.
    Source: Williams et al. 2009 (roofline).
    """
    compute_s = work.flops / hardware.peak(work.dtype)
    memory_s = (work.gemm_bytes + work.optimizer_bytes) / _bandwidth(hardware)
    return (compute_s, COMPUTE) if compute_s >= memory_s else (memory_s, BANDWIDTH)


def ideal_step_s(work: Work, hardware: Hardware) -> float:
    """Seconds one step of eager PyTorch takes if each of its parts runs at the measured peaks. Never below the floor.

    Products, recomputed and padded ones too; bytes between products; operator calls, which a GPU's host starts while
    the device works. Raises UnknownFact as step_floor does.
    """
    device = "cpu" if hardware.device == "cpu" else "cuda"
    moved = work.optimizer_bytes + MOVED_SHARE.get(device, 1.0) * work.elementwise_bytes
    device_s = work.hardware_flops / hardware.peak(work.dtype) + moved / _bandwidth(hardware)
    device_s += work.dropout_elements * DROPOUT_ELEMENT_S.get(device, 0.0)
    calls_s = work.operators * OPERATOR_S[device]
    ideal_s = device_s + calls_s if device == "cpu" else max(device_s, calls_s)
    return max(ideal_s, step_floor(work, hardware)[0])


def expected_step_s(work: Work, hardware: Hardware, expect: Efficiency) -> tuple[float, float]:
    """Seconds one step is expected to take in eager PyTorch, low and high. Never below the floor.

    Raises UnknownFact as step_floor does.
    """
    ideal_s, (floor_s, _) = ideal_step_s(work, hardware), step_floor(work, hardware)
    return max(ideal_s / expect.high, floor_s), max(ideal_s / expect.low, floor_s)


def _bandwidth(hardware: Hardware) -> float:
    if hardware.bandwidth_bytes_per_s is None:
        raise UnknownFact(f"no measured bandwidth for {hardware.name}; `powertrain facts --measure` measures it")
    return hardware.bandwidth_bytes_per_s
