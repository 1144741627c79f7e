"""fp16 matrix products with loss scaling, for GPUs whose tensor cores know no bf16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from powertrain.cost.precision import BF16_SINCE, FP16_SINCE
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique
from powertrain.training.setup import Precision

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


@dataclass(frozen=True)
class Fp16(Technique):
    """Matrix products run in fp16 under autocast; weights, optimizer, norms and softmax stay fp32.

    fp16 has 5 exponent bits: gradients under 6e-8 vanish and products over 65504 overflow. So the loss is multiplied by
    a scale before the backward pass and gradients are divided by it after; a step whose gradients overflowed is skipped
    and the scale halved. The scale is part of the checkpoint.
    """

    name = "fp16"
    does = "multiplies matrices in float16, with loss scaling"
    exactness = Exactness.ROUNDING
    touches = frozenset({"precision"})
    acts_on = frozenset({"products", "attention", "loss", "elementwise", "optimizer"})
    slot = "precision"
    source = "Micikevicius et al. 2018, arXiv:1710.03740; torch.amp.GradScaler"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        hardware = facts.hardware
        if hardware.device != "cuda" or hardware.compute_capability is None:
            return cls.refuse(f"no fp16 matrix units on {hardware.name}: it is for NVIDIA GPUs of compute capability 7.x")
        found = "{}.{}".format(*hardware.compute_capability)
        if hardware.compute_capability >= BF16_SINCE:
            return cls.refuse(f"compute capability {found} has bf16 at the same speed, which needs no loss scaling",
                              possible=cls())
        if hardware.compute_capability < FP16_SINCE:
            return cls.refuse(f"compute capability {found} has no tensor cores; fp16 is not faster before 7.0")
        return Proposal(cls(), because=f"tensor cores of compute capability {found} know fp16 and no bf16",
                        claim=Effect((0.2, 0.7), 0, basis="guess: not measured yet"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, precision=Precision(torch.float16, loss_scaling=True))

    def confirm(self, setup: Setup) -> None:
        if (found := setup.product_dtype()) is not torch.float16:
            raise NotApplied(f"fp16: matrix products come out in {found}")
        master = {parameter.dtype for parameter in setup.model.parameters() if parameter.requires_grad}
        if master != {torch.float32}:
            raise NotApplied(f"fp16: the weights that are trained are {', '.join(sorted(map(str, master)))}, not all fp32")
        if not setup.precision.loss_scaling:
            raise NotApplied("fp16: the loss is not scaled, so small gradients vanish")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, dtype="fp16")
