"""Dense peaks of NVIDIA GPUs as NVIDIA states them in its datasheets, by the product name that torch reports.

datasheets.csv holds only figures that NVIDIA publishes for that very product, in GB/s and TFLOP/s, with the link. A GPU
without a row is unknown: no figure is taken from a similar product. FLOP/s are without sparsity; where a datasheet states
only the sparse figure, the row has half of it. Tensor figures are those with fp32 accumulation, which GeForce runs at half
the rate of fp16 accumulation. The Tesla T4 has no bandwidth, because its editions state 300 and 320 GB/s.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DTYPES = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Datasheet:
    """What NVIDIA states for one product."""

    flops_per_s: Mapping[str, float]         # dense, by DTYPES; a dtype that the datasheet does not state is absent
    bandwidth_bytes_per_s: float | None      # of the device memory
    link: str


def datasheet(name: str) -> Datasheet | None:
    """Return the row for the GPU that torch calls `name`, or None if no row is for exactly that product."""
    return datasheets().get(_normalised(name))


@cache
def datasheets() -> Mapping[str, Datasheet]:
    """Return all rows by the product's normalised name."""
    with Path(__file__).with_name("datasheets.csv").open(encoding="utf-8", newline="") as file:
        return {_normalised(row["name"]): Datasheet({dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]},
                                                    float(row["gb_per_s"]) * 1e9 if row["gb_per_s"] else None, row["link"])
                for row in csv.DictReader(file)}


def _normalised(name: str) -> str:
    """Return the name without case, repeated spaces and the leading vendor word; the rest tells products apart."""
    words = name.lower().split()
    return " ".join(words[1:] if words[:1] in (["nvidia"], ["tesla"]) else words)
