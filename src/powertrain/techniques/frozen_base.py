"""Frozen base: keep the matrices that are not trained in the type that products are computed in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from powertrain.cost.precision import planned_dtype
from powertrain.models.linear import FrozenLinear
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    does = "stores the frozen weights in the type of the products"
    exactness = Exactness.ROUNDING
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    slot = "base"
    source = "performance.md section 2.5: frozen weights need no fp32 master copy (Micikevicius et al. 2018)"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"techniques.frozen_base.dtype={self.dtype!r} is none of {', '.join(DTYPES)}")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        model, stored = facts.model, facts.model.frozen_dtype
        if model.provider != "native":
            return cls.refuse(f"the model is computed by {model.provider}, which keeps its weights as it loads them")
        if not model.adapter_parameters:
            return cls.refuse(f"all {model.trainable:,} weights are trained, and those stay fp32 so that small steps count")
        if stored not in DTYPES:
            return cls.refuse(f"the frozen weights are stored in {stored}, which is made wide for each product")
        planned = planned_dtype(facts.hardware, recipe.techniques).replace("tf32", "fp32")
        weights, free_bytes = model.matmul_parameters, facts.hardware.free_memory_bytes
        more_bytes = (DTYPES[planned].itemsize - DTYPES[stored].itemsize) * weights
        if planned == stored:
            return cls.refuse(f"the frozen weights are stored in {stored} already, which products are computed in")
        if more_bytes > ROOM * free_bytes:
            return cls.refuse(f"{weights:,} frozen weights in {planned} would take {more_bytes / 2**30:.1f} GiB more, and "
                              f"{free_bytes / 2**30:.1f} are free", possible=cls(planned))
        return Proposal(cls(planned), because=f"{weights:,} frozen weights are stored in {stored} and used in {planned}: "
                                              "converted once, not for each product",
                        claim=Effect((0.92, 0.99), more_bytes, basis=f"study: {STUDY}") if facts.hardware.device == "cpu" else
                        Effect((0.9, 1.0), more_bytes, basis="guess: memory by formula, time not measured yet"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, runtime=setup.runtime.also(partial(_convert, setup.model, DTYPES[self.dtype])))

    def confirm(self, setup: Setup) -> None:
        wanted = DTYPES[self.dtype]
        if setup.precision.compute_dtype is not wanted:
            raise NotApplied(f"frozen_base: weights are to be kept in {self.dtype}, and products are computed in "
                             f"{setup.precision.compute_dtype}")
        found = [linear.weight.dtype for linear in _frozen_matrices(setup.model)]
        if not found or set(found) != {wanted}:
            raise NotApplied(f"frozen_base: of {len(found)} frozen matrices {found.count(wanted)} are kept in {self.dtype}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, base_dtype=self.dtype)


def _frozen_matrices(model: nn.Module) -> Iterator[FrozenLinear]:
    """The frozen linears of the blocks that have a weight; quantised ones have none."""
    return (module for module in model.get_submodule("blocks").modules()
            if isinstance(module, FrozenLinear) and module.weight is not None)


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """One matrix after the other, so that there are never two copies of more than one."""
    for linear in _frozen_matrices(model):
        linear.weight.data = linear.weight.data.to(dtype)
