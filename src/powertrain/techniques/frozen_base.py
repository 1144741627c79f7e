"""Frozen base: keep the matrices that are not trained in the type that products are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.shapes import DTYPE_BYTES
from powertrain.techniques.base import GIB, Exactness, PlannedRun, Setup, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from powertrain.models.kernels.frozen import FrozenLinear

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}      # our names, and those of torch
STUDY = "2026-11-21_ablation-docstrings"
ROOM = 0.5                   # share of the free memory that wider weights may take


@dataclass(frozen=True)
class FrozenBase(Technique):
    """A frozen weight is only ever read, and autocast converts it anew for each product, forward and backward.

    Converted once, it costs nothing per pass and, in bf16, half the memory of fp32. Products see the very numbers that
    autocast would make; only what reads the weights besides (DoRA's row lengths) sees them rounded. Embedding, norms and
    head stay as they are.
    """

    dtype: str = "bf16"

    name = "frozen_base"
    does = "stores the frozen weights in the dtype of the matrix products"
    decides_by: ClassVar = {"base_dtype": "dtype"}
    choices: ClassVar = {"dtype": tuple(DTYPES)}
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    slots = frozenset({"base"})
    source = "frozen weights need no fp32 master copy (Micikevicius et al. 2018)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model, stored = run.model, run.model.frozen_dtype
        if not model.adapter_parameters:
            return cls.refuse(Why.DOES_NOT_APPLY, f"all {model.trainable:,} weights are trained, and trained weights stay in "
                                                  "fp32")
        if stored not in DTYPES:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the frozen weights are stored in {stored} and dequantised for each product")
        planned = run.decided.dtype.replace("tf32", "fp32")
        weights, free_bytes = model.matmul_parameters, run.hardware.free_memory_bytes
        more_bytes = (DTYPE_BYTES[planned] - DTYPE_BYTES[stored]) * weights
        if planned == stored:
            return cls.refuse(Why.NOT_NEEDED, f"the frozen weights are already stored in {stored}, the dtype of the products")
        if more_bytes > ROOM * free_bytes:
            return cls.refuse(Why.NO_ROOM, f"{weights:,} frozen weights in {planned} would take {more_bytes / GIB:.1f} GiB "
                              f"more, and {free_bytes / GIB:.1f} GiB are free", cls(planned),
                              numbers={"needed_bytes": more_bytes, "room_bytes": free_bytes})
        return cls(planned).on(
            f"{weights:,} frozen weights are converted from {stored} to {planned} once, not for each product",
            Effect((0.92, 0.99), more_bytes, basis=f"study: {STUDY}") if run.hardware.device == "cpu" else
            Effect((0.9, 1.0), more_bytes, basis="guess: memory by formula, time not measured yet", guessed=True),
            numbers={"weights": weights})

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, runtime=(*setup.runtime, partial(_convert, setup.model, self._torch_dtype())))

    def confirm(self, setup: Setup) -> None:
        wanted = self._torch_dtype()
        if setup.precision.compute_dtype is not wanted:
            raise NotApplied(f"frozen_base: weights are to be kept in {self.dtype}, and products are computed in "
                             f"{setup.precision.compute_dtype}")
        found = [linear.weight.dtype for linear in _frozen_matrices(setup.model)]
        if not found or set(found) != {wanted}:
            raise NotApplied(f"frozen_base: of {len(found)} frozen matrices {found.count(wanted)} are kept in {self.dtype}")

    def _torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return found


def _frozen_matrices(model: nn.Module) -> Iterator[FrozenLinear]:
    """Return the frozen linears of the blocks that have a weight; quantised ones have none."""
    from powertrain.models.kernels.frozen import FrozenLinear

    return (module for module in model.get_submodule("blocks").modules()
            if isinstance(module, FrozenLinear) and module.weight is not None)


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert one matrix after the other, so that memory holds two copies of at most one."""
    for linear in _frozen_matrices(model):
        linear.weight.data = linear.weight.data.to(dtype)
