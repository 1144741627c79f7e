"""`python -m powertrain.models.kernels.fused.making`: compiles functions of a block, told on stdin by library.make, into files.

A process of its own, because torch's ahead-of-time compiler is loaded for it, and because several can work at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.config import ModelConfig
from powertrain.models.kernels.fused.library import FEWEST_ROWS, ROWS, built, structure_of
from powertrain.models.kernels.fused.parts import Parts

MOST_ROWS = 2**24


class Flat(nn.Module):
    """A function of tensors alone, as the compiler wants it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = getattr(Parts(ModelConfig(**told["config"])), told["function"])
        self.structure = json.loads(told["structure"])

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """What the function gives, in its own structure."""
        return self.function(*built(self.structure, tensors))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_tensors(self.call(tensors)))


def main() -> None:
    told = json.load(sys.stdin)
    torch.set_num_threads(told["threads"])
    for job in told["jobs"]:
        compile_one(job)


def compile_one(told: Mapping[str, Any]) -> None:
    """Writes the library, then the file that says what it gives and how its bytes add up.

    Which vector instructions there are is taken from the processor's word: to see each compiled and loaded takes as long as
    a function does, and a compiler that does not know them ends with no library, which `load` sees.
    """
    import torch._inductor

    flat, rows, path = Flat(told), told["rows"], Path(told["path"])
    tensors = tuple(_example(dtype, sizes, strides, rows) for dtype, sizes, strides in told["layout"])
    size = torch.export.Dim("T", min=FEWEST_ROWS, max=MOST_ROWS)
    shapes = tuple({0: size} if sizes[:1] == [ROWS] else None for _, sizes, _ in told["layout"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        gives = structure_of(flat.call(tensors), [0])
        program = torch.export.export(flat, tensors, dynamic_shapes=(shapes,), strict=False)
        made = Path(torch._inductor.aot_compile(program.module(), tensors, options={  # type: ignore[arg-type]
            "aot_inductor.output_path": str(Path(folder) / path.name), "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False, "cpp.vec_isa_ok": True}))
        sum_ = hashlib.sha256(made.read_bytes()).hexdigest()
        aside = Path(folder) / "told.json"
        aside.write_text(json.dumps({"sha256": sum_, "gives": gives}), encoding="utf-8")
        os.replace(made, path)
        os.replace(aside, path.with_suffix(".json"))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []


def _example(dtype: str, sizes: list[Any], strides: list[int], rows: int) -> Tensor:
    shape = [rows if size == ROWS else size for size in sizes]
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype)).zero_()


if __name__ == "__main__":
    main()
