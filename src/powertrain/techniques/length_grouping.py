"""Length grouping: sort a step's examples by length before they are cut into padded passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.cost.fitting import padded_examples, will_pack
from powertrain.cost.workload import padding_share
from powertrain.data.example import Example
from powertrain.records import Effect, Facts, Proposal, Refusal
from powertrain.techniques.base import EVERYTHING, Exactness, NotApplied, Technique
from powertrain.training.setup import in_order

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

WORTH_IT = 0.02              # share of the slots that must be saved


@dataclass(frozen=True)
class LengthGrouping(Technique):
    """A padded pass is as long as its longest example, so examples of similar length should meet in one pass.

    Only the examples of one optimizer step are sorted. A step learns from the same examples as without, unlike where a
    sampler groups a whole epoch and makes the steps themselves short or long.
    """

    name = "length_grouping"
    does = "sorts a step's examples by length before padding"
    exactness = Exactness.ROUNDING
    touches = frozenset({"arrange"})
    acts_on = EVERYTHING - {"optimizer"}
    source = "transformers' group_by_length, within the step; Khomenko et al. 2016, arXiv:1708.05604 (bucketing)"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        data = facts.data
        if data.kind == "blocks" or not data.length_quantiles:
            return cls.refuse(f"all examples have {data.block} tokens, so there is nothing to sort")
        if will_pack(facts.model, data, recipe.techniques):
            return cls.refuse("packing leaves no padding, so the lengths of a pass need not be similar")
        batch, examples = data.train_batch_size, _examples_per_pass(facts, recipe)
        if examples >= batch:
            return cls.refuse(f"all {batch} examples of a step go in one pass, whose order changes nothing", possible=cls())
        before = padding_share(data.length_quantiles, examples)
        after = padding_share(data.length_quantiles, examples, grouped_from=batch)
        shown = f"in passes of {examples} of {batch} examples {before:.0%} of the slots are padding, and {after:.0%} when " \
                "sorted (estimated from the lengths' quantiles)"
        if before - after < WORTH_IT:
            return cls.refuse(f"{shown}: too little to matter", possible=cls())
        ratio = (1 - before) / (1 - after)
        return Proposal(cls(), because=shown,
                        claim=Effect((ratio, (1 + ratio) / 2), 0, basis="formula: slots after over before, estimated from the "
                                     "lengths' quantiles; the high end if half the step does not depend on them"))

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, arrange=self.arrange)

    def confirm(self, setup: Setup) -> None:
        examples = [setup.examples[i] for i in range(min(len(setup.examples), setup.train_batch_size))]
        found = [example.tokens for part in setup.arrange(examples, setup.micro_batch) for example in part]
        if found != sorted(found, reverse=True) or getattr(setup.arrange, "__self__", None) != self:
            raise NotApplied(f"length_grouping: examples are not sorted by length; passes are arranged by {setup.arrange!r}")

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, grouped=True)

    def arrange(self, examples: Sequence[Example], micro_batch: int) -> list[list[Example]]:
        """Passes of `micro_batch` examples, the longest examples first: memory is at its fullest at once."""
        return in_order(sorted(examples, key=lambda example: -example.tokens), micro_batch)


def _examples_per_pass(facts: Facts, recipe: Recipe) -> int:
    """About how many examples a padded pass has: what the recipe pins, else what suits and fits the device."""
    pin = recipe.techniques.get("micro_batch")
    if isinstance(pin, Mapping) and "examples" in pin:
        return int(pin["examples"])
    return padded_examples(facts.model, facts.data, facts.hardware)
