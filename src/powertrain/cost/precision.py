"""The types that a machine multiplies fast: by units of CPUs, or by tensor cores of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.records import Hardware

BF16_SINCE = (8, 0)          # compute capability; torch.cuda.is_bf16_supported() also says yes where it is emulated
FP16_SINCE = (7, 0)          # tensor cores
TF32_SINCE = (8, 0)
VARLEN_SINCE = (8, 0)        # FlashAttention 2
INT8_SINCE = (7, 5)          # tensor cores that multiply int8: Turing
FP8_SINCE = (8, 9)           # Ada; Hopper is 9.0
INT8_CPU_UNITS = ("amx_int8", "avx512_vnni", "avx_vnni")
CPU_UNITS = ("amx_bf16", "avx512_bf16", "bf16")
WORTH_IT = 1.2               # measured bf16 over fp32 below which conversions eat the gain


def bf16_unit(hardware: Hardware) -> str | None:
    """Return what multiplies bf16 here in hardware, or None."""
    return _unit(hardware, CPU_UNITS, BF16_SINCE)


def int8_unit(hardware: Hardware) -> str | None:
    """Return what multiplies int8 here in hardware, or None."""
    return _unit(hardware, INT8_CPU_UNITS, INT8_SINCE)


def fp8_unit(hardware: Hardware) -> str | None:
    """Return what multiplies fp8 here in hardware, or None."""
    return _unit(hardware, (), FP8_SINCE)


def _unit(hardware: Hardware, cpu_units: Sequence[str], since: tuple[int, int]) -> str | None:
    """Return a GPU's tensor cores, or the best of a CPU's units, with the faster matrix unit that an x86 lacks."""
    if hardware.device == "cpu":
        found = next((unit for unit in cpu_units if unit in hardware.instructions), None)
        missed = f", but not the faster {cpu_units[0]}" if found is not None and found.startswith("avx") else ""
        return None if found is None else f"the CPU has {found}{missed}"
    capability = hardware.compute_capability
    if hardware.device != "cuda" or capability is None or capability < since:
        return None
    return f"tensor cores of compute capability {capability[0]}.{capability[1]}"


def bf16_gain(hardware: Hardware) -> float | None:
    """Return how many times faster bf16 products were measured than fp32 ones; None if one was not measured."""
    peaks = hardware.peak_flops_per_s
    return peaks["bf16"] / peaks["fp32"] if "bf16" in peaks and "fp32" in peaks else None


def bf16_pays(hardware: Hardware) -> bool:
    gain = bf16_gain(hardware)
    return bf16_unit(hardware) is not None and (gain is None or gain >= WORTH_IT)


def fp16_pays(hardware: Hardware) -> bool:
    """Return whether this is a GPU whose tensor cores know fp16 and no bf16."""
    capability = hardware.compute_capability
    return hardware.device == "cuda" and capability is not None and FP16_SINCE <= capability < BF16_SINCE


def has_tf32(hardware: Hardware) -> bool:
    return _unit(hardware, (), TF32_SINCE) is not None
