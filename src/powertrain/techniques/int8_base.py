"""int8 base: frozen weights as whole numbers of 8 bits, multiplied as such."""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.cost.precision import int8_unit
from powertrain.cost.weights import eight_bit_saving, why_not_eight_bit
from powertrain.records import Refusal, Why
from powertrain.techniques.base import InEightBits, PlannedRun


@dataclass(frozen=True)
class Int8Base(InEightBits):
    """Both products with a frozen matrix, forward and for the gradient of its input, are made of int8 numbers.

    Each row of a weight and each token of an activation or gradient has a scale of its own, and sums are exact in int32.
    CPUs with VNNI or AMX and NVIDIA's tensor cores make two to four times as many of these products as of bf16 ones, and a
    weight takes one byte. Adapters, norms, embedding and head stay as they are, and so do matrices whose products would lose
    too much, which is measured on the first examples. This changes results slightly, so only a recipe turns it on.
    """

    name = "int8_base"
    does = "stores and multiplies the frozen weights in 8-bit integers"
    stored = "int8"
    source = "Dettmers et al. 2022, arXiv:2208.07339 (LLM.int8); Wortsman et al. 2023, arXiv:2304.13013 (SwitchBack)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        model = run.model
        if (reason := why_not_eight_bit(model)) is not None:
            return cls.refuse(Why.DOES_NOT_APPLY, reason)
        unit = int8_unit(run.hardware)
        if unit is None:
            return cls.refuse(Why.HARDWARE_LACKS, f"{run.hardware.name} has no fast int8 units (VNNI or AMX of a CPU, or "
                                                  "tensor cores since Turing)")
        weights, saved_bytes = eight_bit_saving(model, "int8", run.hardware.device)
        return cls.refuse(Why.CHANGES_RESULT, f"{weights:,} frozen weights would take {saved_bytes / 2**20:,.0f} MiB less "
                          f"({unit}), but 8-bit weights and inputs change the result slightly, so this is used only if you "
                          "ask: techniques.int8_base=on", cls(), numbers={"saved_bytes": saved_bytes})
