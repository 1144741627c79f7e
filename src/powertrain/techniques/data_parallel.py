"""Data parallelism: several processes compute the passes of each step, and sum the gradients before the update."""

from dataclasses import dataclass, replace
from typing import ClassVar

from powertrain.cost.estimate import estimate
from powertrain.records import Effect, NotApplied, Proposal, Refusal, UnknownFact, Why
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun, Setup, Technique

MIB = 2**20
FP32_BYTES = 4


@dataclass(frozen=True)
class DataParallel(Technique):
    """Every process holds the whole model and makes the same update, so the run is that of one process up to rounding.

    The passes of a step are dealt out by their tokens. Loss and gradients are summed over all processes and divided by the
    trained tokens of the whole step, so no mean of means arises however unequal the shares are.
    """

    processes: int = 2

    name = "data_parallel"
    does = "shares the passes of each step among the processes of the run"
    exactness = Exactness.ROUNDING
    decides_by: ClassVar = {"replicas": "processes"}
    for_several = "shares each step among them, which takes less time"
    touches = frozenset()
    acts_on = EVERYTHING - {"optimizer"}
    slots = frozenset({"processes"})
    source = "Li et al. 2020, arXiv:2006.15704 (gradients summed in buckets)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        processes, batch = run.hardware.processes, run.data.train_batch_size
        for rival, parts in (("sharding", run.decided.shards), ("tensor_parallel", run.decided.tensor_degree)):
            if parts > 1:
                return cls.refuse(Why.NOT_NEEDED, f"{rival} shares the passes already", rival=rival)
        summed_bytes = FP32_BYTES * run.model.trainable
        effect, comment = cls(processes)._expected(run)
        return cls(processes).on(
            f"{processes} processes share each step of {batch} examples and sum {summed_bytes / MIB:,.0f} MiB of gradients"
            f"{comment}",
            effect, numbers={"processes": processes, "summed_bytes": summed_bytes})

    def _expected(self, run: PlannedRun) -> tuple[Effect, str]:
        """Return a step's time over that of one process with all cores of a machine, and a clause where that is no gain."""
        try:
            shares = estimate(run.model, self.reckon(run.decided), run.hardware, 1).efficiency
        except UnknownFact:
            shares = None
        if shares is None:
            unknown = "formula: a share of the passes each, without the time of the sum"
            return Effect((1 / self.processes, 1.0), 0, basis=unknown), ""
        slow, fast = (run.hardware.speed_up(share) for share in shares)
        no_gain = "" if fast > 1 else "; they do not pay here: one process is expected to be as fast or faster, so use one"
        return Effect((1 / fast, 1 / slow), 0, basis="formula: the estimate for all processes, over that for one"), no_gain

    def apply(self, setup: Setup) -> Setup:
        return setup

    def confirm(self, setup: Setup) -> None:
        """Sums the gradients of a step's first passes over all processes, and holds their norm against a process's own."""
        from powertrain.training.loop import APART, run_first_passes
        from powertrain.training.ranks import joined_as_planned
        from powertrain.training.sharded import total_norm

        ranks = joined_as_planned(self.name, self.processes)
        parameters = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
        norms = []
        for part in (setup, replace(setup, ranks=ranks)):
            run_first_passes(part, self.processes, parameters)
            norms.append(total_norm(parameters).item())
            for parameter in parameters:
                parameter.grad = None
        if not abs(norms[0] - norms[1]) <= APART * norms[0]:
            raise NotApplied(f"data_parallel: the summed gradients have a norm of {norms[1]:.4g}, and those of one process "
                             f"{norms[0]:.4g}")
