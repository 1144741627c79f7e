"""Context parallelism: several processes divide the tokens of one long document. It is not built, and always refuses."""

from dataclasses import dataclass

from powertrain.cost.fitting import longest_example
from powertrain.records import NotApplied, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique


@dataclass(frozen=True)
class ContextParallel(Technique):
    """Each process would hold a part of every document's tokens, and attention would pass keys and values around a ring.

    That pays where one document alone does not fit the memory of a process.
    """

    name = "context_parallel"
    does = "divides the tokens of each document among the processes of the run"
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset()
    slots = frozenset({"processes"})
    source = "Liu et al. 2023, arXiv:2310.01889 (ring attention)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        longest = longest_example(run.data)
        need = run.need(run.one_example(attention_saves_scores=False))
        return cls.refuse(Why.NOT_BUILT, f"Powertrain cannot divide a document among processes yet; the longest example has "
                          f"{longest:,} tokens, and a pass of it alone needs {need}", numbers=need.numbers)

    def apply(self, setup: Setup) -> Setup:
        raise NotApplied("context_parallel: Powertrain cannot divide a document among processes yet")
