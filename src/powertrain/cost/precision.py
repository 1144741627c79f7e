"""Which types a machine multiplies fast: units of CPUs, tensor cores of GPUs, and since when GPUs have them."""

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
    """What multiplies bf16 here in hardware, or None."""
    if hardware.device == "cpu":
        return _cpu_unit(hardware, CPU_UNITS)
    return _tensor_cores(hardware, BF16_SINCE)


def int8_unit(hardware: Hardware) -> str | None:
    """What multiplies int8 here in hardware, or None."""
    if hardware.device == "cpu":
        return _cpu_unit(hardware, INT8_CPU_UNITS)
    return _tensor_cores(hardware, INT8_SINCE)


def fp8_unit(hardware: Hardware) -> str | None:
    """What multiplies fp8 here in hardware, or None."""
    return _tensor_cores(hardware, FP8_SINCE)


def _cpu_unit(hardware: Hardware, units: Sequence[str]) -> str | None:
    """The best of `units` that there is, and where that is not the first, an x86's matrix unit, what is missed."""
    found = next((unit for unit in units if unit in hardware.instructions), None)
    if found is None:
        return None
    missed = f", but not the faster {units[0]}" if found.startswith("avx") else ""
    return f"the CPU has {found}{missed}"


def _tensor_cores(hardware: Hardware, since: tuple[int, int]) -> str | None:
    capability = hardware.compute_capability
    if hardware.device != "cuda" or capability is None or capability < since:
        return None
    return f"tensor cores of compute capability {capability[0]}.{capability[1]}"


def bf16_gain(hardware: Hardware) -> float | None:
    """How many times faster bf16 products were measured than fp32 ones; None where one was not measured."""
    peaks = hardware.peak_flops_per_s
    return peaks["bf16"] / peaks["fp32"] if "bf16" in peaks and "fp32" in peaks else None


def bf16_pays(hardware: Hardware) -> bool:
    gain = bf16_gain(hardware)
    return bf16_unit(hardware) is not None and (gain is None or gain >= WORTH_IT)


def fp16_pays(hardware: Hardware) -> bool:
    """Whether this is a GPU whose tensor cores know fp16 and no bf16."""
    capability = hardware.compute_capability
    return hardware.device == "cuda" and capability is not None and FP16_SINCE <= capability < BF16_SINCE


def has_tf32(hardware: Hardware) -> bool:
    capability = hardware.compute_capability
    return hardware.device == "cuda" and capability is not None and capability >= TF32_SINCE
