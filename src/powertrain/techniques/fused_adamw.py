"""Fused AdamW, and fused SGD: update every parameter of a group in one kernel instead of about ten operations each."""

from dataclasses import dataclass, replace
from typing import ClassVar

from powertrain.cost.weights import update_bytes
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique
from powertrain.training.optimizers import OPTIMIZERS

ADAPTERS_STUDY = "2026-11-21_ablation-docstrings"    # on a CPU: adapters are a small part of a step
TAKES_DIVIDED = ("adamw",)   # optimizers whose fused update torch has for DTensors


@dataclass(frozen=True)
class FusedAdamW(Technique):
    """The update reads and writes each state once, so its time tends to their bytes over the bandwidth: 28 per weight.

    Same formula and fp32 arithmetic as the plain update; multiplications may be contracted, so the last bit can differ.
    """

    name = "fused_adamw"
    does = "updates all weights in one kernel"
    decides: ClassVar = {"fused_optimizer": True}
    exactness = Exactness.ROUNDING
    touches = frozenset({"optimizer"})
    acts_on = frozenset({"optimizer"})
    slots = frozenset({"optimizer"})
    source = "torch.optim.AdamW(fused=True); Loshchilov & Hutter 2019, arXiv:1711.05101"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        hardware, trainable = run.hardware, run.model.trainable
        if hardware.device not in ("cuda", "cpu", "mps"):
            return cls.refuse(Why.HARDWARE_LACKS, f"torch has no fused optimizers for {hardware.device!r}")
        if not OPTIMIZERS.named(run.optimizer.name).can_fuse:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the recipe's optimizer {run.optimizer.name} has no fused kernel")
        if run.decided.shards > 1 and run.optimizer.name not in TAKES_DIVIDED:
            return cls.refuse(Why.CONFLICT, f"torch's fused {run.optimizer.name} does not take weights that processes divide",
                              rival="sharding")
        because = f"{trainable:,} trained weights are read and written once"
        if hardware.bandwidth_bytes_per_s is not None:
            floor_s = update_bytes(run.model, run.optimizer) / hardware.bandwidth_bytes_per_s
            because += f", which takes at least {floor_s * 1e3:,.2f} ms at the {hardware.basis} bandwidth"
        claim = Effect((0.85, 1.0), 0, basis="guess: the share of the optimizer in a step is not measured", guessed=True)
        if hardware.device == "cpu" and run.model.adapter_parameters:
            claim = Effect((0.97, 1.01), 0, basis=f"study: {ADAPTERS_STUDY}")
        return cls().on(because, claim, numbers={"trained_weights": trainable})

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, optimizer=replace(setup.optimizer, fused=True))

    def confirm(self, setup: Setup) -> None:
        groups = setup.optimizer(setup.model, 0.0).param_groups
        plain = [i for i, group in enumerate(groups) if not group.get("fused")]
        if plain:
            raise NotApplied(f"fused_adamw: parameter groups {plain} of {len(groups)} are not fused")
