"""Four-bit base: the frozen weights in 4 bits, for models that would not fit otherwise."""

from dataclasses import dataclass, replace

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import GIB, Exactness, PlannedRun, Setup, Technique

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
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model = run.model
        if model.method in ("scratch", "full"):
            return cls.refuse(Why.DOES_NOT_APPLY, "every weight is trained, and 4 bits are too few for the small steps of "
                                                  "training")
        need = run.need(run.one_example(attention_saves_scores=False), replace(model, method="lora", frozen_dtype="bf16"))
        saved_bytes = round((2 - BITS[run.recipe.quantisation.double] / 8) * model.matmul_parameters)
        numbers = {**need.numbers, "saved_bytes": saved_bytes}
        there = f"with a bf16 base a step needs about {need}"
        if model.method != "qlora" and need.is_met:
            return cls.refuse(Why.NOT_NEEDED, f"memory is not short: {there}", numbers=numbers)
        if model.method != "qlora":
            return cls.refuse(Why.CHANGES_RESULT, f"{there}; method=qlora would save about {saved_bytes / GIB:.1f} GiB and "
                              "round the base", cure=("method=qlora",), numbers=numbers)
        verdict = ", so method=lora would fit too, faster and without rounding" if need.is_met else ", which is too much"
        return cls().on(f"the recipe's method is qlora, with {model.matmul_parameters:,} weights in 4 bits; {there}{verdict}",
                        Effect((1.0, 1.6), -saved_bytes, basis="guess: memory by formula; the time to dequantise weights for "
                               "each product is not measured yet", guessed=True), numbers=numbers)

    def apply(self, setup: Setup) -> Setup:
        return setup

    def confirm(self, setup: Setup) -> None:
        from powertrain.models.kernels.quantised import QuantisedLinear

        if not any(isinstance(module, QuantisedLinear) or type(module).__name__ == LIBRARY for module in setup.model.modules()):
            raise NotApplied("four_bit_base: no matrix of the model is in 4 bits")
