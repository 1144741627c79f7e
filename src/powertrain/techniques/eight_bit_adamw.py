"""8-bit AdamW, and 8-bit Lion: the moments take one byte each instead of four."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.cost.optimizer import state_bytes
from powertrain.records import Facts, NotApplied, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.base import Exactness, Technique
from powertrain.training.optimizers import OPTIMIZERS, Row

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


@dataclass(frozen=True)
class EightBitAdamW(Technique):
    """Moments are stored as 256 quantiles of their block of 256, and updated in fp32; small tensors stay fp32.

    The rounding stays in the state from step to step, so results change slightly. Only a recipe turns this on; a recipe may
    also name such an optimizer itself: optimizer=adamw_8bit.
    """

    name = "eight_bit_adamw"
    does = "stores AdamW's two moments in 8 bits"
    exactness = Exactness.LOSSY
    touches = frozenset({"optimizer"})
    acts_on = frozenset({"optimizer"})
    slots = frozenset({"optimizer", "moments"})
    source = "Dettmers et al. 2022, arXiv:2110.02861 (8-bit optimizers); bitsandbytes"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Proposal | Refusal:
        row: Row = OPTIMIZERS.named(facts.optimizer.name)
        if row.in_eight_bits is None:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the recipe's optimizer is {row.name}, which has no form with 8-bit moments")
        smaller: Row = OPTIMIZERS.named(row.in_eight_bits)
        if (missing := cls.without_parts(facts, (smaller.part or "",))) is not None:
            return missing
        if (why := smaller.why_not(facts.hardware, facts.software)) is not None:
            return cls.refuse(Why.HARDWARE_LACKS, why)
        smaller_facts = smaller.facts_on(facts.hardware.device)
        saved_bytes = state_bytes(facts.model, facts.optimizer) - state_bytes(facts.model, smaller_facts)
        return cls.refuse(Why.CHANGES_RESULT, f"8-bit moments would save {saved_bytes / 2**20:,.0f} MiB and change the result "
                          "slightly, so they are used only if you ask: techniques.eight_bit_adamw=on", cls(),
                          numbers={"saved_bytes": saved_bytes})

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, optimizer=setup.optimizer.as_row(setup.optimizer.row.in_eight_bits))

    def confirm(self, setup: Setup) -> None:
        optimizer = setup.optimizer(setup.model, 0.0)
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
        if bits != 8:
            raise NotApplied(f"eight_bit_adamw: the states of {type(optimizer).__name__} have {bits} bits")

    def reckon(self, workload: Workload) -> Workload:
        smaller: Row = OPTIMIZERS.named(OPTIMIZERS.named(workload.optimizer.name).in_eight_bits)
        return replace(workload, optimizer=smaller.facts_on(workload.device))
