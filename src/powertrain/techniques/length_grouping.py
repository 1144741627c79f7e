"""Length grouping: sort a step's examples by length before they are cut into padded passes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from powertrain.cost.workload import padding_share
from powertrain.data.example import Example
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun, Setup, Technique, name_of

WORTH_IT = 0.02              # share of the slots that must be saved


@dataclass(frozen=True)
class LengthGrouping(Technique):
    """A padded pass is as long as its longest example, so examples of similar length should meet in one pass.

    Only the examples of one optimizer step are sorted. A step learns from the same examples as without, unlike where a
    sampler groups a whole epoch and makes the steps themselves short or long.
    """

    name = "length_grouping"
    does = "sorts a step's examples by length before padding"
    decides: ClassVar = {"grouped": True}
    exactness = Exactness.ROUNDING
    touches = frozenset({"arrange"})
    acts_on = EVERYTHING - {"optimizer"}
    source = "transformers' group_by_length, within the step; Khomenko et al. 2016, arXiv:1708.05604 (bucketing)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        data = run.data
        if data.kind == "blocks" or not data.length_quantiles:
            return cls.refuse(Why.DOES_NOT_APPLY, f"all examples have {data.block} tokens, so there is nothing to sort")
        if run.decided.packs:
            return cls.refuse(Why.NOT_NEEDED, "packing leaves no padding to reduce", rival="packing")
        batch, examples = data.train_batch_size, run.decided.micro_batch
        if examples >= batch:
            return cls.refuse(Why.NOT_NEEDED, f"all {batch} examples of a step are in one pass, so their order has no "
                                              "effect", cls())
        before = padding_share(data.length_quantiles, examples)
        after = padding_share(data.length_quantiles, examples, grouped_from=batch)
        shown = f"in passes of {examples} of the step's {batch} examples, sorting lowers padding from {before:.0%} to " \
                f"{after:.0%} (estimated from the quantiles of the lengths)"
        numbers = {"padding_share": before, "sorted_padding_share": after}
        if before - after < WORTH_IT:
            return cls.refuse(Why.WOULD_NOT_PAY, f"{shown}, which is too little to matter", cls(), numbers=numbers)
        ratio = (1 - before) / (1 - after)
        return cls().on(shown, Effect((ratio, (1 + ratio) / 2), 0, basis="formula: padded tokens after over before, estimated "
                                      "from the quantiles of the lengths; the high end assumes that half the step does not "
                                      "depend on padding"),
                        numbers=numbers)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, arrange=self.arrange)

    def confirm(self, setup: Setup) -> None:
        examples = [setup.examples[i] for i in range(min(len(setup.examples), setup.train_batch_size))]
        found = [example.tokens for part in setup.arrange(examples, setup.micro_batch) for example in part]
        if found != sorted(found, reverse=True) or getattr(setup.arrange, "__self__", None) != self:
            raise NotApplied("length_grouping: examples are not sorted by length; passes are arranged by "
                             f"{name_of(setup.arrange)}")

    def arrange(self, examples: Sequence[Example], micro_batch: int) -> list[list[Example]]:
        """Return passes of `micro_batch` examples, the longest first, so that the memory peak comes at once."""
        from powertrain.training.setup import in_order

        return in_order(sorted(examples, key=lambda example: -example.tokens), micro_batch)
