"""Packing: examples of unequal lengths laid end to end, in passes of about equal work, with no padding anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from powertrain.cost.fitting import fitting_tokens, longest_example, wanted_tokens
from powertrain.cost.workload import Workload, padding_share
from powertrain.data.example import Example, collate_filled, real_documents
from powertrain.data.order import pack
from powertrain.records import Batch, Effect, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun, Setup, Technique, name_of

ROOMY = 1.1                  # of a step's mean tokens: what passes of one size have room for
LEAST_TOKENS = 64            # of a pass, however little memory there is: less is all overhead
SIZES = 32                   # of passes, about. oneDNN makes a product ready for each size and keeps a thousand; see CPU_STUDY
CPU_MULTIPLES = (16, 256)    # the smallest and the largest to which a pass is filled up
CPU_STUDY = "2026-11-21_cpu-packing-multiple"


@dataclass(frozen=True)
class Packing(Technique):
    """Padding costs as much time as real tokens and teaches nothing, so examples lie end to end instead.

    Each document keeps to itself: attention stays inside it, positions restart, and the rest of the model works on
    tokens one by one. Only the examples of one optimizer step are packed together, so a step learns from the same
    examples as without, and the loss is divided by the same number of trained tokens.
    """

    tokens: int = 4096                       # of a pass, at most; a longer example is a pass of its own
    crossover: int = 8192                    # tokens of a document whose attention costs as much as its matrix products
    multiple: int = 1                        # a pass is filled up to a multiple of so many tokens, so that sizes repeat

    name = "packing"
    does = "lays examples end to end, so that no pass has padding"
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"collate", "arrange"})
    acts_on = EVERYTHING - {"optimizer"}
    slots = frozenset({"passes"})
    source = "Krell et al. 2021, arXiv:2107.02027 (packing); Kundu et al. 2024, arXiv:2407.09105 (padding-free)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model, data, hardware = run.model, run.data, run.hardware
        if data.kind == "blocks":
            return cls.refuse(Why.DOES_NOT_APPLY, f"all examples have {data.block} tokens, so there is no padding")
        fitting, step_tokens = fitting_tokens(model, run.decided, hardware, data.block), data.train_batch_size * data.block
        # the longest example is a pass of its own in any case, so passes of fewer tokens would need as much memory
        tokens = min(wanted_tokens(hardware), max(fitting, longest_example(data)))
        if run.least_passes > 1:             # a pass for each at least
            tokens = min(tokens, -(-step_tokens // run.least_passes))
        tokens = max(LEAST_TOKENS, tokens)
        share = padding_share(data.length_quantiles, data.train_batch_size) if data.length_quantiles else 0.0
        multiple = _cpu_multiple(min(tokens, fitting, step_tokens)) if hardware.device == "cpu" else 1
        tokens -= tokens % multiple
        if run.decided.replayed:
            tokens = multiple = _constant_tokens(step_tokens, tokens, longest_example(data))
        filled = ", all filled up to this size because a CUDA graph has one shape" if 1 < multiple == tokens else \
            f", filled up to multiples of {multiple} so that sizes repeat (study: {CPU_STUDY})" if multiple > 1 else ""
        passes = -(-step_tokens // tokens)
        # a token costs 2 (P + H) FLOPs in products and, in a document of l tokens, 2 L l d in attention, in each forward pass
        crossover = (model.matmul_parameters + model.head_parameters) / (model.layers * model.heads * model.head_width)
        return cls(tokens, max(1, round(crossover)), multiple).on(
            f"a padded batch of {data.train_batch_size} would be {share:.0%} padding (examples have {data.block} tokens on "
            f"average, {longest_example(data)} at most); about {step_tokens:,} tokens a step go in {passes} "
            f"pass{'es' * (passes != 1)} of up to {tokens:,} tokens{filled}",
            Effect((1 - share, 1 - share / 2), 0, basis="formula: the share of padding, estimated from the quantiles of the "
                   "lengths; the high end assumes that half the step does not depend on it"),
                   numbers={"padding_share": share, "passes": passes})

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        """Return the plan's passes, passes of double and half the tokens, and passes that are not filled up; None pads."""
        if (found := cls.settings_of(cls.answer(run))) is None:
            return ()
        others = (replace(found, tokens=2 * found.tokens), found.halved(), replace(found, multiple=1))
        return found, *(other for other in others if other is not None), None

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, collate=self.collate, arrange=self.arrange)

    def confirm(self, setup: Setup) -> None:
        passes = setup.prepare(0)
        padding = max(batch.padding_tokens for batch in passes)
        if padding >= self.multiple or getattr(setup.collate, "__self__", None) != self:
            raise NotApplied(f"packing: {padding} slots of a pass are padding; batches are made by {name_of(setup.collate)}")
        documents = [real_documents(batch) for batch in passes]
        full = [sum(batch.lengths) - batch.padding_tokens for batch, count in zip(passes, documents, strict=True) if count > 1]
        if max(full, default=0) > self.tokens or getattr(setup.arrange, "__self__", None) != self:
            raise NotApplied(f"packing: a pass has {max(full, default=0)} tokens, not {self.tokens} at most; passes are "
                             f"arranged by {name_of(setup.arrange)}")
        expected = sum(len(setup.objective.documents(example)) for example in setup.examples_of(0))
        if sum(documents) != expected:
            raise NotApplied(f"packing: the passes of a step have {sum(documents)} documents, not {expected}")

    def reckon(self, workload: Workload) -> Workload:
        micro_batch = max(1, min(workload.examples, self.tokens // workload.block))
        return replace(workload, micro_batch=micro_batch, packed_tokens=self.tokens, fill_multiple=self.multiple)

    def halved(self) -> Self | None:
        if self.tokens <= LEAST_TOKENS:
            return None
        tokens = max(LEAST_TOKENS, self.tokens // 2)
        if 1 < self.multiple == self.tokens:
            return replace(self, tokens=tokens, multiple=tokens)
        multiple = self.multiple if tokens >= self.multiple else 1
        return replace(self, tokens=tokens - tokens % multiple, multiple=multiple)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Return the examples end to end, filled up to a multiple."""
        return collate_filled(examples, self.multiple)

    def arrange(self, examples: Sequence[Example], micro_batch: int) -> list[list[Example]]:
        """Return the passes of a step, costliest first: memory peaks in the first pass, and not later by surprise."""
        del micro_batch                      # examples per pass; here a pass has as many as fit
        passes = pack([example.tokens for example in examples], self.tokens, crossover=self.crossover)
        return [[examples[i] for i in chosen] for chosen in passes]


def _cpu_multiple(pass_tokens: int) -> int:
    """Return to how many tokens passes are filled up, a power of two: sizes repeat, and little of a pass is padding."""
    least, most = CPU_MULTIPLES
    if pass_tokens < least:
        return 1
    return min(most, max(least, 1 << (-(-pass_tokens // SIZES) - 1).bit_length()))


def _constant_tokens(step_tokens: int, most: int, longest: int) -> int:
    """Return the tokens of passes that are all filled up: a step's tokens and some more, over as few passes as `most` allows.

    Steps differ in length, and one that is a little too long would cost a whole pass of padding.
    """
    expected = ROOMY * step_tokens
    passes = math.ceil(expected / most)
    return min(most, max(longest, 64 * math.ceil(expected / passes / 64)))
