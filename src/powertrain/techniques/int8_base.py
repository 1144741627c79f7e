"""int8 base: frozen weights as whole numbers of 8 bits, multiplied as such."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from powertrain.cost.precision import int8_unit
from powertrain.cost.weights import eight_bit_saving, why_not_eight_bit
from powertrain.models.kernels.scaled import INT8, TRIED_TOKENS, Coarse, scale_base
from powertrain.records import Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


@dataclass(frozen=True)
class Int8Base(Technique):
    """Both products with a frozen matrix, forward and for the gradient of its input, are made of int8 numbers.

    Each row of a weight and each token of an activation or gradient has a scale of its own, and sums are exact in int32.
    CPUs with VNNI or AMX and NVIDIA's tensor cores make two to four times as many of these products as of bf16 ones, and a
    weight takes one byte. Adapters, norms, embedding and head stay as they are, and so do matrices whose products would lose
    too much, which is measured on the first examples. It is other mathematics, though close, so it is left to a pin.
    """

    name = "int8_base"
    does = "stores and multiplies the frozen weights in 8-bit integers"
    exactness = Exactness.LOSSY
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    slot = "base"
    source = "Dettmers et al. 2022, arXiv:2208.07339 (LLM.int8); Wortsman et al. 2023, arXiv:2304.13013 (SwitchBack)"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        model = facts.model
        if (why := why_not_eight_bit(model)) is not None:
            return cls.refuse(why)
        unit = int8_unit(facts.hardware)
        if unit is None:
            return cls.refuse(f"{facts.hardware.name} multiplies no int8 numbers that would be known here to be fast "
                              f"(a CPU's VNNI or AMX, or tensor cores from Turing on)")
        weights, saved_bytes = eight_bit_saving(model, "int8", facts.hardware.device)
        return cls.refuse(f"{unit}, and {weights:,} frozen weights would take {saved_bytes / 2**20:,.0f} MiB "
                          "less, but they and what they meet are rounded to 255 values, so it is left to a pin", possible=cls())

    def apply(self, setup: Setup) -> Setup:
        scale = partial(scale_base, setup.model, INT8, partial(setup.try_out, TRIED_TOKENS),
                        otherwise=setup.precision.compute_dtype)
        return replace(setup, runtime=setup.runtime.also(scale))

    def confirm(self, setup: Setup) -> None:
        found = Coarse.of(setup.model, INT8)
        if not found.scaled:
            raise NotApplied(f"int8_base: no frozen matrix of the model is in int8 ({found})")

    def found(self, setup: Setup) -> str:
        return f"int8_base: {Coarse.of(setup.model, INT8)}"

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, base_dtype="int8")
