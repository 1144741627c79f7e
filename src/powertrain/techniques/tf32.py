"""TF32: let tensor cores multiply fp32 matrices, rounding their inputs to 10 bits of mantissa."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from powertrain.cost.precision import has_tf32, planned_dtype
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


@dataclass(frozen=True)
class Tf32(Technique):
    """It changes fp32 products only: under bf16 or fp16 there are none left, so it shares their slot and steps back."""

    name = "tf32"
    does = "multiplies float32 matrices on tensor cores"
    exactness = Exactness.ROUNDING
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "attention", "loss"})
    slot = "precision"
    source = "PyTorch notes on CUDA semantics, TensorFloat-32; torch.backends.cuda.matmul.fp32_precision"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        capability = facts.hardware.compute_capability
        if facts.hardware.device != "cuda" or capability is None:
            return cls.refuse(f"{facts.hardware.name} has no TF32 units: they came with NVIDIA's Ampere GPUs")
        if not has_tf32(facts.hardware):
            return cls.refuse(f"compute capability {capability[0]}.{capability[1]} has no TF32; it came with 8.0")
        if (planned := planned_dtype(facts.hardware, recipe.techniques)) != "tf32":
            return cls.refuse(f"products in {planned} leave no fp32 products to speed up", possible=cls())
        return Proposal(cls(), because=f"fp32 products can use the tensor cores of capability {capability[0]}.{capability[1]}",
                        claim=Effect((0.3, 0.95), 0, basis="guess: not measured yet"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, runtime=setup.runtime.also(_allow))

    def confirm(self, setup: Setup) -> None:
        found = torch.backends.cuda.matmul.fp32_precision
        if found != "tf32":
            raise NotApplied(f"tf32: fp32 products are computed in {found!r}")
        if setup.precision.compute_dtype is not torch.float32:
            raise NotApplied(f"tf32: no fp32 products are left under {setup.precision.compute_dtype}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, dtype="tf32")


def _allow() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
