"""fp8 base: frozen weights in 8-bit floating point, multiplied as such."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from powertrain.cost.precision import FP8_SINCE, fp8_unit
from powertrain.cost.weights import eight_bit_saving, why_not_eight_bit
from powertrain.records import Facts, NotApplied, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.base import Exactness, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


@dataclass(frozen=True)
class Fp8Base(Technique):
    """Both products with a frozen matrix, forward and for the gradient of its input, are made of fp8 (e4m3) numbers.

    Ada and Hopper make twice as many of these as of bf16 ones, and a weight takes one byte. Every token has a scale of its
    own, in gradients too, so they need not e5m2's range and keep e4m3's third bit. Unlike int8, 3 bits round small and large
    numbers alike, so outliers harm less and everything else is rounded more. Weights are rounded once, not at each step.
    Adapters, norms, embedding and head stay as they are. This changes results slightly, so only a recipe turns it on.
    """

    name = "fp8_base"
    does = "stores and multiplies the frozen weights in 8-bit floats"
    native_only = True
    exactness = Exactness.LOSSY
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    slots = frozenset({"base"})
    source = "Micikevicius et al. 2022, arXiv:2209.05433 (FP8 formats); torch._scaled_mm with a scale for each row"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Proposal | Refusal:
        model, hardware = facts.model, facts.hardware
        if (reason := why_not_eight_bit(model)) is not None:
            return cls.refuse(Why.DOES_NOT_APPLY, reason)
        unit = fp8_unit(hardware)
        if unit is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"{hardware.name} has no fp8 units; NVIDIA GPUs have them from compute "
                                                  f"capability {FP8_SINCE[0]}.{FP8_SINCE[1]} (Ada) on")
        if decided.dtype != "bf16":
            return cls.refuse(Why.CONFLICT, f"fp8 products give bf16 results, and this run computes in {decided.dtype}",
                              rival=decided.dtype)
        weights, saved_bytes = eight_bit_saving(model, "fp8", hardware.device)
        return cls.refuse(Why.CHANGES_RESULT, f"{weights:,} frozen weights would take {saved_bytes / 2**20:,.0f} MiB less "
                          f"({unit}), but fp8 weights and inputs (3 bits of mantissa) change the result slightly, so this is "
                          "used only if you ask: techniques.fp8_base=on", cls(), numbers={"saved_bytes": saved_bytes})

    def apply(self, setup: Setup) -> Setup:
        from powertrain.models.kernels.scaled import FP8, TRIED_TOKENS, scale_base

        scale = partial(scale_base, setup.model, FP8, partial(setup.try_out, TRIED_TOKENS),
                        otherwise=setup.precision.compute_dtype)
        return replace(setup, runtime=setup.runtime.also(scale))

    def confirm(self, setup: Setup) -> None:
        from powertrain.models.kernels.scaled import FP8, Coarse

        found = Coarse.of(setup.model, FP8)
        if not found.scaled:
            raise NotApplied(f"fp8_base: no frozen matrix of the model is in fp8 ({found})")

    def found(self, setup: Setup) -> str:
        from powertrain.models.kernels.scaled import FP8, Coarse

        return f"fp8_base: {Coarse.of(setup.model, FP8)}"

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, base_dtype="fp8")
