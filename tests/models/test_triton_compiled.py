"""Triton's kernels become machine code for every GPU that they are meant for, without spills: no GPU is needed.

The interpreter (test_triton_kernels.py) does not compile: it runs kernels that no GPU would take.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed, whose compiler this asks: pip install triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from powertrain.models.kernels import triton_losses  # noqa: E402
from powertrain.models.kernels.fused import triton_kernels as kernels  # noqa: E402
from powertrain.records import IGNORE  # noqa: E402
from powertrain.techniques.fused_blocks import WIDEST_ROW  # noqa: E402

NVIDIA, AMD = (75, 80, 89, 90, 100, 120), {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}        # AMD: threads of a wave
TARGETS = {**{f"sm_{cap}": GPUTarget("cuda", cap, 32) for cap in NVIDIA},
           **{name: GPUTarget("hip", name, threads) for name, threads in AMD.items()}}
WIDTHS = (768, 2048, 4096, WIDEST_ROW)       # blocks of 1,024 to 8,192; the widest is that of Llama 70B and Qwen2 72B
NUMBERS = {"rows", "vocabulary", "width", "heads", "half", "rest", "token_stride", "head_stride", "table_stride"}
FP32 = {"_normalise_rows": {"x", "weight", "joined", "rates"}, "_normalise_rows_back": {"rates", "weight", "dx", "out"},
        "_swiglu_rows": set(), "_swiglu_rows_back": set(), "_turn_heads": {"cosines", "sines"},
        "_cross_entropy_rows": {"losses"}}
OTHERS = {"epsilon": "fp32", "smoothing": "fp32", "z_loss": "fp32", "targets": "*i64"}
VOCABULARIES = (50, 32_000, 151_936)


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each kernel with the constants of its launches."""
    for width in WIDTHS:
        yield kernels._normalise_rows, {"HAS_ADDED": True, **kernels._whole_row(width)}
        yield kernels._normalise_rows_back, kernels._whole_row(width)
    yield kernels._normalise_rows, {"HAS_ADDED": False, **kernels._whole_row(WIDTHS[-1])}
    for vocabulary in VOCABULARIES:
        for has_terms, has_gradient in ((False, True), (True, True), (False, False)):
            yield triton_losses._cross_entropy_rows, {"IGNORED": IGNORE, "HAS_TERMS": has_terms, "HAS_GRADIENT": has_gradient,
                                                      **triton_losses.piece(vocabulary)}
    yield kernels._swiglu_rows, {"BLOCK": kernels.PIECE}
    yield kernels._swiglu_rows_back, {"BLOCK": kernels.PIECE}
    yield kernels._turn_heads, {"BLOCK": 64, "REST": 0}
    yield kernels._turn_heads, {"BLOCK": 16, "REST": 64}     # gpt_neox turns a quarter of a head


def compiled(kernel: Any, constants: Mapping[str, Any], target: GPUTarget) -> Any:
    half = "fp16" if target.arch == 75 else "bf16"           # Turing has no bf16
    constants = dict(constants)
    options = {"num_warps": constants.pop("num_warps", 4)}
    in_fp32 = FP32[kernel.__name__]
    signature = {name: "constexpr" if name in constants else OTHERS.get(name) or "i32" if name in NUMBERS or name in OTHERS
                 else "*fp32" if name in in_fp32 else f"*{half}" for name in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)


def spilled(binary: Any, folder: Path) -> int:
    """Bytes of a thread's stack (NVIDIA), or its spilled registers (AMD)."""
    if "amdgcn" in binary.asm:
        return sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", binary.asm["amdgcn"])))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", said.stdout + said.stderr)
    assert found is not None, said
    return int(found[1])


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_without_spills(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    spills = {f"{kernel.__name__} {constants}": spilled(compiled(kernel, constants, TARGETS[target]), tmp_path)
              for kernel, constants in cases()}
    assert not {name: count for name, count in spills.items() if count}
