"""Four-bit base: the frozen weights in 4 bits, for models that would not fit otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.cost.fitting import longest_example, planned_room_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, ModelFacts, NotApplied, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.base import GIB, Exactness, Technique, of_free

if TYPE_CHECKING:
    from torch import nn

    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

BITS = {True: 4.13, False: 4.5}              # a weight with its share of the scales, by whether those are quantised too
LIBRARY = "Linear4bit"       # bitsandbytes' module, in models that other libraries compute


@dataclass(frozen=True)
class FourBitBase(Technique):
    """`method: qlora` is the user's choice and part of what is trained: the model is built with it, and learns beside it.

    Rounding to 16 values changes the model, and making weights wide again for each product takes time. So it pays only
    where the memory would not suffice, and where it would, the plan says so.
    """

    name = "four_bit_base"
    does = "stores the frozen weights in 4 bits"
    exactness = Exactness.LOSSY
    touches = frozenset()                    # the model comes with it
    acts_on = frozenset({"products", "elementwise"})
    source = "Dettmers et al. 2023, arXiv:2305.14314 (QLoRA); bitsandbytes"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Proposal | Refusal:
        model, room_bytes = facts.model, planned_room_bytes(facts.hardware)
        if model.method in ("scratch", "full"):
            return cls.refuse(Why.DOES_NOT_APPLY, "every weight is trained, and 4 bits are too few for the small steps of "
                                                  "training")
        needed_bytes = _needed_bytes(facts)
        saved_bytes = round((2 - BITS[recipe.quantisation.double] / 8) * model.matmul_parameters)
        numbers = {"needed_bytes": needed_bytes, "room_bytes": room_bytes, "saved_bytes": saved_bytes}
        there = f"with a bf16 base a step needs about {of_free(needed_bytes, room_bytes)}"
        if model.method != "qlora" and needed_bytes <= room_bytes:
            return cls.refuse(Why.NOT_NEEDED, f"memory is not short: {there}", numbers=numbers)
        if model.method != "qlora":
            return cls.refuse(Why.CHANGES_RESULT, f"{there}; method=qlora would save about {saved_bytes / GIB:.1f} GiB and "
                              "round the base", cure=("method=qlora",), numbers=numbers)
        verdict = ", so method=lora would fit too, faster and without rounding" if needed_bytes <= room_bytes else \
            ", which is too much"
        return cls().on(f"the recipe's method is qlora, with {model.matmul_parameters:,} weights in 4 bits; {there}{verdict}",
                        Effect((1.0, 1.6), -saved_bytes, basis="guess: memory by formula; the time to dequantise weights for "
                               "each product is not measured yet"), numbers=numbers)

    def apply(self, setup: Setup) -> Setup:
        return setup

    def confirm(self, setup: Setup) -> None:
        quantised = [name for name, module in setup.model.named_modules() if _is_four_bit(module)]
        if not quantised:
            raise NotApplied("four_bit_base: no matrix of the model is in 4 bits")


def _is_four_bit(module: nn.Module) -> bool:
    from powertrain.models.kernels.quantised import QuantisedLinear

    return isinstance(module, QuantisedLinear) or type(module).__name__ == LIBRARY


def _needed_bytes(facts: Facts) -> int:
    """Peak memory of a step with the base in bf16 and one example at a time."""
    model: ModelFacts = replace(facts.model, method="lora", frozen_dtype="bf16")
    one = Workload(facts.data.train_batch_size, longest_example(facts.data), micro_batch=1, attention_saves_scores=False)
    return sum(peak_memory(model, one).values())
