"""8-bit AdamW, and 8-bit Lion: the moments take one byte each instead of four."""

from dataclasses import dataclass

from powertrain.cost.weights import state_bytes
from powertrain.records import NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, OptimizerForm, PlannedRun, Setup


@dataclass(frozen=True)
class EightBitAdamW(OptimizerForm):
    """Moments are stored as 256 quantiles of their block of 256, and updated in fp32; small tensors stay fp32.

    The rounding stays in the state from step to step, so results change slightly. Only a recipe turns this on; a recipe may
    also name such an optimizer itself: optimizer=adamw_8bit.
    """

    name = "eight_bit_adamw"
    does = "stores AdamW's two moments in 8 bits"
    needs_whole_weights = True
    exactness = Exactness.LOSSY
    form = "in_eight_bits"
    source = "Dettmers et al. 2022, arXiv:2110.02861 (8-bit optimizers); bitsandbytes"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        row = cls.row_for(run.optimizer.name)
        if row is None:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the recipe's optimizer is {run.optimizer.name}, which has no form with "
                                                  "8-bit moments")
        if (missing := cls.without_parts(run, (row.part or "",))) is not None:
            return missing
        if (why := row.why_not(run.hardware, run.software)) is not None:
            return cls.refuse(Why.HARDWARE_LACKS, why)
        smaller = row.facts_on(run.hardware.device, average_bytes=run.optimizer.average_bytes)
        saved_bytes = state_bytes(run.model, run.optimizer) - state_bytes(run.model, smaller)
        return cls.refuse(Why.CHANGES_RESULT, f"8-bit moments would save {saved_bytes / 2**20:,.0f} MiB and change the result "
                          "slightly, so they are used only if you ask: techniques.eight_bit_adamw=on", cls(),
                          numbers={"saved_bytes": saved_bytes})

    def confirm(self, setup: Setup) -> None:
        optimizer = setup.optimizer(setup.model, 0.0)
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
        if bits != 8:
            raise NotApplied(f"eight_bit_adamw: the states of {type(optimizer).__name__} have {bits} bits")
