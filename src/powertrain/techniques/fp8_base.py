"""fp8 base: frozen weights in 8-bit floating point, multiplied as such."""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.cost.precision import FP8_SINCE, fp8_unit
from powertrain.cost.weights import eight_bit_saving, why_not_eight_bit
from powertrain.records import Refusal, Why
from powertrain.techniques.base import InEightBits, PlannedRun


@dataclass(frozen=True)
class Fp8Base(InEightBits):
    """Both products with a frozen matrix, forward and for the gradient of its input, are made of fp8 (e4m3) numbers.

    Ada and Hopper make twice as many of these as of bf16 ones, and a weight takes one byte. Every token has a scale of its
    own, in gradients too, so they need not e5m2's range and keep e4m3's third bit. Unlike int8, 3 bits round small and large
    numbers alike, so outliers harm less and everything else is rounded more. Weights are rounded once, not at each step.
    Adapters, norms, embedding and head stay as they are. This changes results slightly, so only a recipe turns it on.
    """

    name = "fp8_base"
    does = "stores and multiplies the frozen weights in 8-bit floats"
    stored = "fp8"
    source = "Micikevicius et al. 2022, arXiv:2209.05433 (FP8 formats); torch._scaled_mm with a scale for each row"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        model, hardware = run.model, run.hardware
        if (reason := why_not_eight_bit(model)) is not None:
            return cls.refuse(Why.DOES_NOT_APPLY, reason)
        unit = fp8_unit(hardware)
        if unit is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"{hardware.name} has no fp8 units; NVIDIA GPUs have them from compute "
                                                  f"capability {FP8_SINCE[0]}.{FP8_SINCE[1]} (Ada) on")
        if run.decided.dtype != "bf16":
            return cls.refuse(Why.CONFLICT, f"fp8 products give bf16 results, and this run computes in {run.decided.dtype}",
                              rival=run.decided.dtype)
        weights, saved_bytes = eight_bit_saving(model, "fp8", hardware.device)
        return cls.refuse(Why.CHANGES_RESULT, f"{weights:,} frozen weights would take {saved_bytes / 2**20:,.0f} MiB less "
                          f"({unit}), but fp8 weights and inputs (3 bits of mantissa) change the result slightly, so this is "
                          "used only if you ask: techniques.fp8_base=on", cls(), numbers={"saved_bytes": saved_bytes})
