"""Paged AdamW: moments in memory that the GPU's driver moves out to the host when the GPU runs short."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.cost.fitting import longest_example, planned_room_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.optimizer import state_bytes
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, NotApplied, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.base import GIB, Exactness, Technique
from powertrain.training.optimizers import OPTIMIZERS, Row

if TYPE_CHECKING:
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


@dataclass(frozen=True)
class PagedAdamW(Technique):
    """The optimizer's moments and the activations are needed at different times, so they take turns in the GPU's memory.

    Same formula and fp32 states as the plain update. Moving pages takes time where they really do not fit, and none
    where they do.
    """

    name = "paged_adamw"
    does = "lets AdamW's moments move to host memory when the GPU is full"
    exactness = Exactness.ROUNDING
    touches = frozenset({"optimizer"})
    acts_on = frozenset({"optimizer"})
    slots = frozenset({"optimizer", "moments"})
    source = "Dettmers et al. 2023, arXiv:2305.14314, section 3 (paged optimizers); bitsandbytes"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Proposal | Refusal:
        hardware, model = facts.hardware, facts.model
        row: Row = OPTIMIZERS.named(facts.optimizer.name)
        if row.paged is None:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the recipe's optimizer is {row.name}, which has no paged form")
        paged: Row = OPTIMIZERS.named(row.paged)
        if hardware.device not in paged.devices:
            return cls.refuse(Why.HARDWARE_LACKS, f"NVIDIA's driver does the paging, and this run is on {hardware.name}")
        if (missing := cls.without_parts(facts, (paged.part or "",))) is not None:
            return missing
        one = Workload(facts.data.train_batch_size, longest_example(facts.data), micro_batch=1, attention_saves_scores=False,
                       optimizer=facts.optimizer)
        needed_bytes, room_bytes = sum(peak_memory(model, one).values()), planned_room_bytes(hardware)
        moments_bytes = state_bytes(model, facts.optimizer)
        shown = f"a step needs {needed_bytes / GIB:.2f} of {room_bytes / GIB:.1f} GiB, moments {moments_bytes / GIB:.2f} of it"
        numbers = {"needed_bytes": needed_bytes, "room_bytes": room_bytes}
        if needed_bytes <= room_bytes:
            return cls.refuse(Why.NOT_NEEDED, f"memory is not short: {shown}", cls(), numbers=numbers)
        # ahead of the fused update in their slot: a step that is slower is better than one that does not fit
        return cls().on(f"memory is short: {shown}",
                        Effect((0.8, 2.0), -moments_bytes, basis="guess: memory by formula; the low end stands for a step that "
                               "would not fit at all"), numbers=numbers)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, optimizer=setup.optimizer.as_row(setup.optimizer.row.paged))

    def confirm(self, setup: Setup) -> None:
        optimizer = setup.optimizer(setup.model, 0.0)
        if not getattr(optimizer, "is_paged", False):
            raise NotApplied(f"paged_adamw: the states of {type(optimizer).__name__} are not paged")

    def reckon(self, workload: Workload) -> Workload:
        paged: Row = OPTIMIZERS.named(OPTIMIZERS.named(workload.optimizer.name).paged)
        return replace(workload, optimizer=paged.facts_on(workload.device))
