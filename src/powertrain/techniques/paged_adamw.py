"""Paged AdamW: moments in memory that the GPU's driver moves out to the host when the GPU runs short."""

from dataclasses import dataclass

from powertrain.cost.weights import state_bytes
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.records.sizes import memory
from powertrain.techniques.base import Exactness, OptimizerForm, PlannedRun, Setup


@dataclass(frozen=True)
class PagedAdamW(OptimizerForm):
    """The optimizer's moments and the activations are needed at different times, so they take turns in the GPU's memory.

    Same formula and fp32 states as the plain update. Moving pages takes time where they really do not fit, and none
    where they do.
    """

    name = "paged_adamw"
    does = "lets AdamW's moments move to host memory when the GPU is full"
    needs_whole_weights = True
    exactness = Exactness.ROUNDING
    form = "paged"
    source = "Dettmers et al. 2023, arXiv:2305.14314, section 3 (paged optimizers); bitsandbytes"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        paged = cls.row_for(run.optimizer.name)
        if paged is None:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the recipe's optimizer is {run.optimizer.name}, which has no paged form")
        if run.hardware.device not in paged.devices:
            return cls.refuse(Why.HARDWARE_LACKS, f"NVIDIA's driver does the paging, and this run is on {run.hardware.name}")
        if (missing := cls.without_parts(run, (paged.part or "",))) is not None:
            return missing
        need = run.need(run.one_example(attention_saves_scores=False))
        moments_bytes = state_bytes(run.model, run.optimizer)
        shown = f"a step needs {need}; the moments take {memory(moments_bytes)} of that"
        if need.is_met:
            return cls.refuse(Why.NOT_NEEDED, f"memory is not short: {shown}", cls(), numbers=need.numbers)
        # ahead of the fused update in their slot: a step that is slower is better than one that does not fit
        return cls().on(f"memory is short: {shown}",
                        Effect((0.8, 2.0), -moments_bytes, basis="guess: memory by formula; the low end stands for a step that "
                               "would not fit at all", guessed=True), numbers=need.numbers)

    def confirm(self, setup: Setup) -> None:
        optimizer = setup.optimizer(setup.model, 0.0)
        if not getattr(optimizer, "is_paged", False):
            raise NotApplied(f"paged_adamw: the states of {type(optimizer).__name__} are not paged")
