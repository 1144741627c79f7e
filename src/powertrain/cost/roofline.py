"""How long a step takes: the floor that the machine sets, and the interval to expect above it.

The floor is what no software beats at the measured peaks; the expectation adds that kernels reach only a share of the
peak, that eager PyTorch moves tensors between products, and that every operator call costs time by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.cost.work import Work
from powertrain.records import Hardware, UnknownFact

COMPUTE = "compute"
BANDWIDTH = "memory bandwidth"


@dataclass(frozen=True)
class Efficiency:
    """What a kind of device makes of its peaks in eager PyTorch, from the best case to the worst."""

    gemm_share: tuple[float, float]          # of the measured GEMM peak, large products
    small_gemm_share: tuple[float, float]    # the same for products too small to fill the device
    operator_s: tuple[float, float]          # one operator call or kernel launch
    dropout_element_s: tuple[float, float]   # one random number and its use, forward and backward
    overlaps: bool                           # the host starts operators while the device still works
    basis: str


CPU = Efficiency(gemm_share=(0.75, 0.35), small_gemm_share=(0.5, 0.1), operator_s=(10e-6, 20e-6),
                 dropout_element_s=(5e-9, 20e-9), overlaps=False,
                 basis="guess: a CPU reaches 35-75 % of its measured GEMM peak in large products, 10-50 % in small "
                       "ones, and spends 10-20 us on an operator call")
GPU = Efficiency(gemm_share=(0.85, 0.4), small_gemm_share=(0.5, 0.1), operator_s=(4e-6, 6e-6),
                 dropout_element_s=(0.0, 0.0), overlaps=True,
                 basis="guess: a GPU reaches 40-85 % of its measured GEMM peak in large products, 10-50 % in small "
                       "ones, and takes 4-6 us to start a kernel")
LARGE_TOKENS = 1024                          # of a micro-batch: from here on, products count as large ...
LARGE_WIDTH = 256                            # ... if the model is also this wide. guess: until a study says otherwise


def efficiency(hardware: Hardware) -> Efficiency:
    """The efficiencies to expect of this machine, with their basis."""
    return CPU if hardware.device == "cpu" else GPU


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


def expected_step_s(work: Work, hardware: Hardware, *, micro_batch_tokens: int, width: int) -> tuple[float, float]:
    """Seconds one step is expected to take in eager PyTorch, low and high. Never below the floor.

    Raises UnknownFact as step_floor does. The basis is `efficiency(hardware).basis`.
    """
    expect = efficiency(hardware)
    large = micro_batch_tokens >= LARGE_TOKENS and width >= LARGE_WIDTH
    shares = expect.gemm_share if large else expect.small_gemm_share
    gemm_s = work.hardware_flops / hardware.peak(work.dtype)
    moved_s = (work.elementwise_bytes + work.optimizer_bytes) / _bandwidth(hardware)
    floor_s, _ = step_floor(work, hardware)
    # low: caches keep what operators pass on, so only the optimizer moves bytes; high: every operator goes to memory
    kept_s = work.optimizer_bytes / _bandwidth(hardware)
    low_s, high_s = (
        _step_s(gemm_s / share + bytes_s + work.dropout_elements * drop_s, work.operators * call_s, expect.overlaps)
        for share, bytes_s, drop_s, call_s
        in zip(shares, (kept_s, moved_s), expect.dropout_element_s, expect.operator_s, strict=True)
    )
    return max(low_s, floor_s), max(high_s, floor_s)


def _step_s(device_s: float, calls_s: float, overlaps: bool) -> float:
    return max(device_s, calls_s) if overlaps else device_s + calls_s


def _bandwidth(hardware: Hardware) -> float:
    if hardware.bandwidth_bytes_per_s is None:
        raise UnknownFact(f"no measured bandwidth for {hardware.name}; `powertrain facts --measure` measures it")
    return hardware.bandwidth_bytes_per_s
