"""Shared prompt: the prompt of a pair is computed once, and both answers attend to it."""

from dataclasses import dataclass, replace

from powertrain.cost.workload import Workload
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun, Setup, Technique
from powertrain.training.comparing import Comparing
from powertrain.training.objectives import objective_of

WORTH_SHARE = 0.03           # of the tokens: what gathering keys and values for attention may cost
CHANGING = ("phi3",)         # families whose positions may depend on a document's length (longrope)


@dataclass(frozen=True)
class SharedPrompt(Technique):
    """Both documents of a pair begin with the same prompt, so its embeddings, products and norms are computed once.

    The prompt stands in the batch before its chosen answer. The rejected answer goes on at the prompt's end: its positions do,
    and attention sees prompt and answer as one document. So each document has the numbers that it would have on its own, and
    the prompt's gradient is the sum over both. The prompt's last token predicts two answers and is computed twice.
    """

    share: float = 0.0                       # of the tokens, that this saves

    name = "shared_prompt"
    does = "computes the prompt of a pair once for both answers"
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"objective"})
    acts_on = EVERYTHING - {"optimizer"}
    asked_first = True
    source = "prefix sharing in preference optimisation: Wang and Hegde 2024, arXiv:2410.20305"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        objective, model, share = objective_of(run.recipe), run.model, round(run.data.shared_share, 4)
        if objective.rows not in ("preference", "comparison"):
            return cls.refuse(Why.DOES_NOT_APPLY, f"the objective {objective.name} does not learn from pairs of answers")
        if model.family in CHANGING:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the positions of {model.family} may depend on a document's length, and the "
                                                  "two documents of a pair differ in it")
        shown = f"{share:.0%} of the tokens of an epoch are prompts that stand in a pair a second time"
        numbers = {"shared_share": share}
        if model.dropout or model.adapter_dropout:
            return cls.refuse(Why.CHANGES_RESULT, f"{shown}, and with dropout both answers would see the same dropped prompt",
                              cls(share), numbers=numbers)
        if share < WORTH_SHARE:
            return cls.refuse(Why.WOULD_NOT_PAY, f"{shown}; below {WORTH_SHARE:.0%}, gathering keys and values for attention "
                              "costs what is saved", cls(share), numbers=numbers)
        basis = "formula: the share of the tokens; the high end assumes that half of a step does not depend on them"
        return cls(share).on(shown, Effect((1 - share, 1 - share / 2), 0, basis=basis), numbers=numbers)

    def apply(self, setup: Setup) -> Setup:
        assert isinstance(setup.objective, Comparing)
        return replace(setup, objective=replace(setup.objective, shares_prompts=True))

    def confirm(self, setup: Setup) -> None:
        passes = setup.prepare(0)
        if not getattr(setup.objective, "shares_prompts", False):
            raise NotApplied(f"shared_prompt: the objective {setup.objective.name} computes each document on its own")
        lone = [batch for batch in passes if batch.comparison is None or batch.comparison.shared is None]
        if len(lone) == len(passes) and self.share > 0:
            raise NotApplied("shared_prompt: no pass of the first step has a prompt that is shared")

    def reckon(self, workload: Workload) -> Workload:
        kept = 1 - self.share
        lengths = {name: tokens if name == "max" else max(1, round(kept * tokens)) for name, tokens in workload.lengths.items()}
        return replace(workload, block=max(1, round(kept * workload.block)), lengths=lengths, spread=1 / kept)
