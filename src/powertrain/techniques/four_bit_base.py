"""Four-bit base: the frozen weights in 4 bits, for models that would not fit otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from powertrain.cost.fitting import longest_example, planned_room_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.models.kernels.quantised import QuantisedLinear
from powertrain.records import Effect, Facts, ModelFacts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
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
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        model, room_bytes = facts.model, planned_room_bytes(facts.hardware)
        if model.method in ("scratch", "full"):
            return cls.refuse("every weight is trained, and 16 values are too few for the small steps of training")
        needed_bytes = _needed_bytes(facts)
        saved_bytes = round((2 - BITS[recipe.quantisation.double] / 8) * model.matmul_parameters)
        there = f"unquantised in bf16 it needs about {needed_bytes / 2**30:.1f} GiB, and {room_bytes / 2**30:.1f} are there"
        if model.method != "qlora":
            hint = "it fits" if needed_bytes <= room_bytes else \
                f"method=qlora would save about {saved_bytes / 2**30:.1f} GiB, at the price of rounding the base"
            return cls.refuse(f"{there}: {hint}")
        verdict = "method=lora would do, faster and without rounding" if needed_bytes <= room_bytes else "it would not fit"
        return Proposal(cls(), because=f"{model.matmul_parameters:,} weights are kept in 4 bits; {there}: {verdict}",
                        claim=Effect((1.0, 1.6), -saved_bytes, basis="guess: memory by formula; the time that it takes to make "
                                     "weights wide for each product is not measured yet"))

    def apply(self, setup: Setup) -> Setup:
        return setup

    def confirm(self, setup: Setup) -> None:
        quantised = [name for name, module in setup.model.named_modules() if _is_four_bit(module)]
        if not quantised:
            raise NotApplied("four_bit_base: no matrix of the model is in 4 bits")


def _is_four_bit(module: nn.Module) -> bool:
    return isinstance(module, QuantisedLinear) or type(module).__name__ == LIBRARY


def _needed_bytes(facts: Facts) -> int:
    """Peak memory of a step with the base in bf16 and one example at a time."""
    model: ModelFacts = replace(facts.model, method="lora", frozen_dtype="bf16")
    one = Workload(facts.data.train_batch_size, longest_example(facts.data), micro_batch=1, attention_saves_scores=False)
    return sum(peak_memory(model, one).values())
