"""Flat parameters: all trained weights in one buffer per decay group, so that the update is a pass or two in all."""

from dataclasses import dataclass, replace
from typing import ClassVar

from powertrain.cost.weights import trained_weights
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why, WrongUse
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique
from powertrain.training.optimizers import OPTIMIZERS

GAIN, STUDY = (0.95, 0.97), "2026-11-27_flat-char-cpu"


@dataclass(frozen=True)
class FlatParameters(Technique):
    """On a CPU the norm, clipping and the update start a parallel loop for every tensor; here only one for every group.

    AdamW works element by element, and so has the same results; the norm is summed in another order, and clipping divides
    where it multiplied. A gradient is added to zeros instead of taken as it is, which is exact.
    """

    name = "flat_parameters"
    does = "puts all trained weights into one buffer per group"
    needs_whole_weights = True
    decides: ClassVar = {"flat_parameters": True}
    native_only = True                       # elsewhere a weight may have no gradient, and AdamW skips it
    exactness = Exactness.ROUNDING
    touches = frozenset({"optimizer", "runtime"})
    acts_on = frozenset({"optimizer"})
    slots = frozenset({"moments"})
    source = "Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO: flat fp32 partitions); PyTorch FSDP's FlatParameter"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        hardware = run.hardware
        if not OPTIMIZERS.named(run.optimizer.name).can_be_flat:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the recipe's optimizer {run.optimizer.name} does not update each "
                                                  "weight's elements one by one")
        if hardware.device != "cpu":
            return cls.refuse(Why.WOULD_NOT_PAY, f"on {hardware.device} one kernel already updates many tensors, and a buffer "
                                                 "needs one more kernel for each gradient", cls())
        tensors = sum(one.count for one in trained_weights(run.model))
        if run.decided.whole_pass:
            return cls().on(f"gradients are written where they stay, and {tensors:,} tensors are clipped and updated in one or "
                            "two buffers", Effect(GAIN, 0, basis=f"study: {STUDY}"), numbers={"tensors": tensors})
        return cls.refuse(Why.NOT_MEASURED, f"{tensors:,} tensors would be clipped and updated in one or two buffers, "
                          "and no study has shown yet that this is faster", cls(), numbers={"tensors": tensors})

    def apply(self, setup: Setup) -> Setup:
        from powertrain.training.updates import flattened

        if not setup.optimizer.row.can_be_flat:
            raise WrongUse(f"flat_parameters needs an optimizer that works element by element, and {setup.optimizer.row.name} "
                           "does not; use techniques.flat_parameters=off", cure=("techniques.flat_parameters=off",))

        def flatten() -> None:
            """Move the weights, before anything is compiled or captured for the memory that they have."""
            for group in setup.optimizer.groups(setup.model, 0.0):
                flattened(group["params"])

        return replace(setup, optimizer=replace(setup.optimizer, flat=True), runtime=(*setup.runtime, flatten))

    def confirm(self, setup: Setup) -> None:
        """Raise NotApplied unless every trained weight lies in the buffer that the optimizer updates."""
        from powertrain.training.updates import buffer_of

        groups = setup.optimizer.groups(setup.model, 0.0)
        apart = [group for group in groups if buffer_of(group["params"]) is None]
        if apart:
            raise NotApplied(f"flat_parameters: the weights of {len(apart)} of {len(groups)} groups have memory of their own")
        updated = [weight for group in setup.optimizer(setup.model, 0.0).param_groups for weight in group["params"]]
        if [weight.data_ptr() for weight in updated] != [group["params"][0].data_ptr() for group in groups]:
            raise NotApplied(f"flat_parameters: {len(updated)} tensors are updated, not the {len(groups)} buffers")
