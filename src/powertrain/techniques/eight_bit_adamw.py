"""8-bit AdamW: the two moments in one byte each instead of four, block by block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from powertrain.records import Facts, Proposal, Refusal
from powertrain.records.plan import Why
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

FP32_MOMENTS_BYTES, MOMENT_BYTES = 8, 2  # per trained weight: two fp32 moments become two bytes and their scales
SAVED_BYTES = FP32_MOMENTS_BYTES - MOMENT_BYTES
KEYS = ("lr", "betas", "eps")


@dataclass(frozen=True)
class EightBitAdamW(Technique):
    """Moments are stored as 256 quantiles of their block of 256, and updated in fp32; small tensors stay fp32.

    The rounding stays in the state from step to step, so results change slightly. Only a recipe turns this on.
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
        if facts.hardware.device != "cuda":
            return cls.refuse(Why.HARDWARE_LACKS, f"bitsandbytes needs an NVIDIA GPU, and this run is on {facts.hardware.name}")
        if (missing := cls.without_parts(facts, ("bitsandbytes",))) is not None:
            return missing
        saved_bytes = SAVED_BYTES * facts.model.trainable
        return cls.refuse(Why.CHANGES_RESULT, f"8-bit moments would save {saved_bytes / 2**20:,.0f} MiB and change the result "
                          "slightly, so they are used only if you ask: techniques.eight_bit_adamw=on", cls(),
                          numbers={"saved_bytes": saved_bytes})

    def apply(self, setup: Setup) -> Setup:
        from powertrain.training.library_optimizers import library_adamw

        given: dict[str, Any] = setup.optimizer.keywords  # type: ignore[attr-defined]
        return replace(setup, optimizer=partial(library_adamw("AdamW8bit"), **{key: given[key] for key in KEYS}))

    def confirm(self, setup: Setup) -> None:
        from powertrain.training.loop import parameter_groups

        optimizer = setup.optimizer(parameter_groups(setup.model, 0.0))
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
        if bits != 8:
            raise NotApplied(f"eight_bit_adamw: the states of {setup.optimizer!r} have {bits} bits")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, moment_bytes=MOMENT_BYTES)
