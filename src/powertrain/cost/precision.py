"""The types that a machine multiplies fast: by units of CPUs, or by tensor cores of GPUs."""

from powertrain.records import Hardware

# compute capability of the first tensor cores; torch.cuda.is_bf16_supported() also says yes where bf16 is emulated
GPU_SINCE = {"fp16": (7, 0), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}      # Turing: 7.5, Ada: 8.9
VARLEN_SINCE = (8, 0)        # FlashAttention 2
# AMD: matrix cores since MI200, and since RX 7000. fp8 of the MI300 is another format than torch.float8_e4m3fn, and nobody
# has tried TF32 and torch._int_mm here.
AMD_UNITS = {"bf16": ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")}
AMD_UNITS["fp16"] = AMD_UNITS["bf16"]
CPU_UNITS: dict[str, tuple[str, ...]] = {"bf16": ("amx_bf16", "avx512_bf16", "bf16"),
                                         "int8": ("amx_int8", "avx512_vnni", "avx_vnni")}
WORTH_IT = 1.2               # measured bf16 over fp32 below which conversions eat the gain


def unit_of(hardware: Hardware, dtype: str) -> str | None:
    """Return what multiplies `dtype` fast here: a GPU's tensor cores, or the best of a CPU's units; None if nothing does.

    Of a CPU's unit it also says which faster matrix unit an x86 lacks.
    """
    if hardware.device == "cpu":
        units = CPU_UNITS.get(dtype, ())
        found = next((unit for unit in units if unit in hardware.instructions), None)
        missed = f", but not the faster {units[0]}" if found is not None and found.startswith("avx") else ""
        return None if found is None else f"the CPU has {found}{missed}"
    if hardware.device == "mps":             # Metal does not tell what its units multiply: the measurement does
        return f"Metal multiplies {dtype}" if dtype in ("bf16", "fp16") and dtype in hardware.peak_flops_per_s else None
    if hardware.architecture:
        has = hardware.architecture.startswith(AMD_UNITS.get(dtype, ()))
        return f"matrix cores of {hardware.architecture}" if has else None
    capability = hardware.compute_capability
    if hardware.device != "cuda" or capability is None or capability < GPU_SINCE[dtype]:
        return None
    return f"tensor cores of compute capability {capability[0]}.{capability[1]}"


def shown(capability: tuple[int, ...]) -> str:
    """Return a compute capability as NVIDIA writes it, such as 7.5."""
    return ".".join(map(str, capability))


def gain_of(hardware: Hardware, dtype: str) -> float | None:
    """Return how many times faster products of a type were measured than fp32 ones; None if one was not measured."""
    peaks = hardware.peak_flops_per_s
    return peaks[dtype] / peaks["fp32"] if dtype in peaks and "fp32" in peaks else None


def bf16_pays(hardware: Hardware) -> bool:
    gain = gain_of(hardware, "bf16")
    return unit_of(hardware, "bf16") is not None and (gain is None or gain >= WORTH_IT)


def fp16_pays(hardware: Hardware) -> bool:
    """Return whether this is a GPU whose tensor cores know fp16 and no bf16, or a Mac where only fp16 is faster."""
    if hardware.device == "mps":
        return not bf16_pays(hardware) and (gain_of(hardware, "fp16") or 0) >= WORTH_IT
    capability = hardware.compute_capability
    return hardware.device == "cuda" and capability is not None and GPU_SINCE["fp16"] <= capability < GPU_SINCE["bf16"]
