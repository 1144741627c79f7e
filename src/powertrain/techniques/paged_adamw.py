"""Paged AdamW: moments in memory that the GPU's driver moves out to the host when the GPU runs short."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from powertrain.cost.fitting import longest_example, planned_room_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique
from powertrain.training.library_optimizers import library_adamw
from powertrain.training.loop import parameter_groups

if TYPE_CHECKING:
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

MOMENT_BYTES = 8             # per trained weight, fp32
KEYS = ("lr", "betas", "eps")


@dataclass(frozen=True)
class PagedAdamW(Technique):
    """The moments are needed once a step, and activations at another time; so they can take turns in the GPU's memory.

    Same formula and fp32 states as the plain update. Moving pages takes time where they really do not fit, and none
    where they do.
    """

    name = "paged_adamw"
    does = "lets AdamW's moments move to host memory when the GPU is full"
    exactness = Exactness.ROUNDING
    touches = frozenset({"optimizer"})
    acts_on = frozenset({"optimizer"})
    slot = "optimizer"
    source = "Dettmers et al. 2023, arXiv:2305.14314, section 3 (paged optimizers); bitsandbytes"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        hardware, model = facts.hardware, facts.model
        if hardware.device != "cuda":
            return cls.refuse(f"paging is done by NVIDIA's driver, and this run is on {hardware.name}")
        if "bitsandbytes" in facts.software.missing:
            return cls.refuse(f"it needs the part 'bitsandbytes', which is {facts.software.missing['bitsandbytes']}")
        one = Workload(facts.data.train_batch_size, longest_example(facts.data), micro_batch=1, attention_saves_scores=False)
        needed_bytes, room_bytes = sum(peak_memory(model, one).values()), planned_room_bytes(hardware)
        moments_bytes = MOMENT_BYTES * model.trainable
        shown = f"a step needs {needed_bytes / 2**30:.2f} GiB, of which moments {moments_bytes / 2**30:.2f}, and " \
                f"{room_bytes / 2**30:.1f} are there"
        if needed_bytes <= room_bytes:
            return cls.refuse(f"{shown}: nothing has to move out", possible=cls())
        # ahead of the fused update in their slot: a step that is slower is better than one that does not fit
        return Proposal(cls(), because=shown,
                        claim=Effect((0.8, 2.0), -moments_bytes, basis="guess: memory by formula; the low end stands for a "
                                     "step that would not fit at all"))

    def apply(self, setup: Setup) -> Setup:
        given: dict[str, Any] = setup.optimizer.keywords  # type: ignore[attr-defined]
        return replace(setup, optimizer=partial(library_adamw("PagedAdamW32bit"), **{key: given[key] for key in KEYS}))

    def confirm(self, setup: Setup) -> None:
        optimizer = setup.optimizer(parameter_groups(setup.model, 0.0))
        if not getattr(optimizer, "is_paged", False):
            raise NotApplied(f"paged_adamw: the states of {setup.optimizer!r} are not paged")
