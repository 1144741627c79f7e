"""Dense peaks of NVIDIA GPUs as NVIDIA states them, by the product name that torch reports.

Only rows and figures that NVIDIA publishes for that very product: a GPU that is not here is unknown, and nothing is
taken from its neighbour. FLOP/s without sparsity; where a datasheet states only the sparse figure, half of it.
Tensor figures are those with fp32 accumulation, which GeForce runs at half the rate of fp16 accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SITE = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_HOPPER = "https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306"
_H200 = "https://resources.nvidia.com/en-us-gpu-resources/hpc-datasheet-sc23"
_A100 = f"{_SITE}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_ADA_PROFESSIONAL = ("https://images.nvidia.com/aem-dam/en-zz/Solutions/technologies/"
                     "NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf")
_BLACKWELL = ("https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
              "nvidia-rtx-blackwell-gpu-architecture.pdf")
_TURING = f"{_SITE}/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"


@dataclass(frozen=True)
class Datasheet:
    """What NVIDIA states for one product."""

    flops_per_s: Mapping[str, float]         # dense, by "fp32", "tf32", "bf16", "fp16"; a dtype not stated is absent
    bandwidth_bytes_per_s: float | None      # of the device memory
    link: str


def datasheet(name: str) -> Datasheet | None:
    """The row for the GPU that torch calls `name`, or None if there is none for exactly that product."""
    return _TABLE.get(_normalised(name))


def _normalised(name: str) -> str:
    """Case, repeated spaces and the leading vendor word do not tell products apart; everything else does."""
    words = name.lower().split()
    return " ".join(words[1:] if words[:1] in (["nvidia"], ["tesla"]) else words)


def _row(link: str, gb_per_s: float | None, **tflops: float) -> Datasheet:
    bandwidth = None if gb_per_s is None else gb_per_s * 1e9
    return Datasheet({dtype: rate * 1e12 for dtype, rate in tflops.items()}, bandwidth, link)


_A100_RATES = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
_H100_SXM_RATES = {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}
_NVL_RATES = {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5}

_ROWS = {
    "NVIDIA B200": _row("https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
                        8000, bf16=2250, fp16=2250),
    "NVIDIA H200": _row(_H200, 4800, **_H100_SXM_RATES),
    "NVIDIA H200 NVL": _row(_H200, 4800, **_NVL_RATES),
    "NVIDIA H100 80GB HBM3": _row(_HOPPER, 3350, **_H100_SXM_RATES),
    "NVIDIA H100 NVL": _row(_HOPPER, 3900, **_NVL_RATES),
    "NVIDIA H100 PCIe": _row("https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c",
                             2000, fp32=51, tf32=378, bf16=756, fp16=756),
    "NVIDIA A100-SXM4-40GB": _row(_A100, 1555, **_A100_RATES),
    "NVIDIA A100-SXM4-80GB": _row(_A100, 2039, **_A100_RATES),
    "NVIDIA A100-PCIE-40GB": _row(_A100, 1555, **_A100_RATES),
    "NVIDIA A100 80GB PCIe": _row(_A100, 1935, **_A100_RATES),
    "NVIDIA A30": _row(f"{_SITE}/data-center/products/a30-gpu/pdf/a30-datasheet.pdf",
                       933, fp32=10.3, tf32=82, bf16=165, fp16=165),
    "NVIDIA A40": _row("https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf",
                       696, fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7),
    "NVIDIA A10": _row(f"{_SITE}/Data-Center/a10/pdf/a10-datasheet.pdf",
                       600, fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    "NVIDIA A10G": _row("https://d1.awsstatic.com/product-marketing/ec2/"
                        "NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
                        600, fp32=31.52, tf32=35, bf16=70, fp16=70),
    "NVIDIA L4": _row("https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet",
                      300, fp32=30.3, tf32=60, bf16=121, fp16=121),
    "NVIDIA L40": _row("https://www.nvidia.com/en-us/data-center/l40/",
                       864, fp32=90.5, tf32=90.5, bf16=181.05, fp16=181.05),
    "NVIDIA L40S": _row("https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
                        864, fp32=91.6, tf32=183, bf16=362.05, fp16=362.05),
    "Tesla T4": _row(f"{_SITE}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
                     None, fp32=8.1, fp16=65),           # its editions state 300 and 320 GB/s
    "Tesla V100-SXM2-16GB": _row(_V100, 900, fp32=15.7, fp16=125),
    "Tesla V100-SXM2-32GB": _row(_V100, 900, fp32=15.7, fp16=125),
    "NVIDIA GeForce RTX 2080 Ti": _row(_TURING, 616, fp32=13.4, fp16=53.8),
    "NVIDIA GeForce RTX 3070": _row(_AMPERE, 448, fp32=20.3, tf32=20.3, bf16=40.6, fp16=40.6),
    "NVIDIA GeForce RTX 3080": _row(_AMPERE, 760, fp32=29.8, tf32=29.8, bf16=59.5, fp16=59.5),
    "NVIDIA GeForce RTX 3090": _row(_AMPERE, 936, fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    "NVIDIA GeForce RTX 3090 Ti": _row(_ADA, 1008, fp32=40, tf32=40, bf16=80, fp16=80),
    "NVIDIA GeForce RTX 4070 Ti": _row(_ADA, 504, fp32=40.1, tf32=40.1, bf16=80.2, fp16=80.2),
    "NVIDIA GeForce RTX 4080": _row(_ADA, 717, fp32=48.7, tf32=48.7, bf16=97.5, fp16=97.5),
    "NVIDIA GeForce RTX 4090": _row(_ADA, 1008, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2),
    "NVIDIA GeForce RTX 5070": _row(_BLACKWELL, 672, fp32=30.9, tf32=30.9, bf16=61.7, fp16=61.7),
    "NVIDIA GeForce RTX 5080": _row(_BLACKWELL, 960, fp32=56.3, tf32=56.3, bf16=112.6, fp16=112.6),
    "NVIDIA GeForce RTX 5090": _row(_BLACKWELL, 1792, fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5),
    "NVIDIA RTX A6000": _row(_AMPERE, 768, fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8),
    "NVIDIA RTX 6000 Ada Generation": _row(_ADA_PROFESSIONAL, 960, fp32=91.1, tf32=182.1, bf16=364.2, fp16=364.2),
}
_TABLE = {_normalised(name): row for name, row in _ROWS.items()}
