"""Flat parameters: all trained weights in one buffer per decay group, so that the update is a pass or two in all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from powertrain.cost.gradients import adapter_tensors, has_frozen_base
from powertrain.records import Facts, ModelFacts, Proposal, Refusal, WrongUse
from powertrain.techniques.base import Exactness, NotApplied, Technique
from powertrain.training.flat_optimizer import FlatAdamW, buffer_of, flattened
from powertrain.training.loop import parameter_groups

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

OTHER_STATES = ("eight_bit_adamw", "paged_adamw")


@dataclass(frozen=True)
class FlatParameters(Technique):
    """On a CPU norm, clipping and update begin and end a parallel loop for every tensor, however small; here for every group.

    AdamW works element by element, and so has the same results; the norm is summed in another order, and clipping divides
    where it multiplied. A gradient is added to zeros instead of taken as it is, which is exact.
    """

    name = "flat_parameters"
    does = "puts all trained weights into one buffer per group"
    exactness = Exactness.ROUNDING
    touches = frozenset({"optimizer", "runtime"})
    acts_on = frozenset({"optimizer"})
    source = "Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO: flat fp32 partitions); PyTorch FSDP's FlatParameter"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        hardware, model = facts.hardware, facts.model
        if model.provider != "native":
            return cls.refuse(f"the model is computed by {model.provider}, which may leave a weight without a gradient: AdamW "
                              "passes over such a one, and a pass over all of them would not")
        if other := [name for name in OTHER_STATES if recipe.techniques.get(name, "off") != "off"]:
            return cls.refuse(f"the recipe asks for {other[0]}, whose states are scaled or paged tensor by tensor")
        if hardware.device != "cpu":
            return cls.refuse(f"on {hardware.device} a kernel takes many tensors already, and a gradient that has to be added "
                              "to a buffer is a kernel more for each weight and pass", possible=cls())
        return cls.refuse(f"{_trained_tensors(model):,} tensors would be clipped and updated as one or two; no study "
                          "has shown yet that this is faster", possible=cls())

    def apply(self, setup: Setup) -> Setup:
        optimizer: Any = setup.optimizer
        if getattr(optimizer, "func", None) not in (torch.optim.AdamW, FlatAdamW):
            raise WrongUse(f"flat_parameters is for torch's AdamW, and {optimizer!r} keeps its state another way; set "
                           "techniques.flat_parameters=off, or the other technique for the optimizer")
        return replace(setup, optimizer=partial(FlatAdamW, **optimizer.keywords),
                       runtime=setup.runtime.also(partial(_flatten, setup.model)))

    def confirm(self, setup: Setup) -> None:
        """Every trained weight lies in the buffer that the optimizer updates."""
        groups = parameter_groups(setup.model, 0.0)
        apart = [group for group in groups if buffer_of(group["params"]) is None]
        if apart:
            raise NotApplied(f"flat_parameters: the weights of {len(apart)} of {len(groups)} groups have memory of their own")
        updated = [weight for group in setup.optimizer(groups).param_groups for weight in group["params"]]
        if [weight.data_ptr() for weight in updated] != [group["params"][0].data_ptr() for group in groups]:
            raise NotApplied(f"flat_parameters: {len(updated)} tensors are updated, not the {len(groups)} buffers")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, flat_parameters=True)


def _trained_tensors(model: ModelFacts) -> int:
    if has_frozen_base(model):
        return len(model.adapted_layers) * len(adapter_tensors(model))
    return sum(model.layers if name.startswith("blocks.") else 1 for name in model.shapes)


def _flatten(model: nn.Module) -> None:
    """Before anything is compiled or captured for the memory that the weights have."""
    for group in parameter_groups(model, 0.0):
        flattened(group["params"])
