"""Stored reference: the frozen reference's log-probabilities, computed once and kept beside the examples."""

from dataclasses import dataclass, replace
from typing import ClassVar

from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why
from powertrain.records.sizes import memory
from powertrain.shapes import FP32
from powertrain.techniques.base import EVERYTHING, Exactness, PlannedRun, Setup, Technique
from powertrain.training import comparing
from powertrain.training.objectives import objective_of

FORWARD_SHARE = 1 / 3        # of a step's products, where all weights are trained: forward, and twice that backward
FROZEN_SHARE = 1 / 2         # where most are frozen and get no gradient


@dataclass(frozen=True)
class StoredReference(Technique):
    """The reference never changes, so what it says of each answer is computed once, before the first step, and stored.

    A later run over the same examples with the same model finds the scores in the cache. Without this technique each step
    computes the reference's forward pass: by the trained weights as they were at the beginning, which a copy keeps. With
    adapters that is the base model and costs little memory; where all weights are trained it is a second model.
    """

    name = "stored_reference"
    does = "computes the reference's log-probabilities once and keeps them beside the examples"
    decides: ClassVar = {"reference_in_step": False}
    exactness = Exactness.ROUNDING
    touches = frozenset({"objective"})
    acts_on = EVERYTHING - {"optimizer"}
    source = "TRL's precompute_ref_log_probs"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        objective = objective_of(run.recipe)
        if not objective.has_reference:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the objective {objective.name} has no frozen reference")
        model, data = run.model, run.data
        stored = round(data.examples * (1 + data.validation_tokens / max(1, data.train_tokens)))
        read = run.recipe.steps(data.examples) * data.train_batch_size
        copy_bytes = FP32 * model.trainable
        share = FROZEN_SHARE if model.adapter_parameters else FORWARD_SHARE
        numbers = {"stored_examples": stored, "read_examples": read, "copy_bytes": copy_bytes, "forward_share": share}
        work = f"{stored:,} examples are scored once, or found in the cache; otherwise the steps would compute {read:,} " \
               f"forward passes of an example, about {share / (1 + share):.0%} of their time"
        kept = f"a copy of the {model.trainable:,} trained weights ({memory(copy_bytes)})"
        if model.adapter_parameters and read < stored and run.hardware.processes == 1:
            return cls.refuse(Why.WOULD_NOT_PAY, f"the run reads {read:,} examples, fewer than the {stored:,} that would be "
                              "scored before the first step; with its adapters as they were at the beginning, the model is its "
                              f"own reference in each step, for {kept}", cls(), numbers=numbers)
        basis = "formula: the share of a forward pass in the products of a step; the high end assumes that scoring takes as " \
                "long as it saves"
        return cls().on(f"{work}, and keep {kept}", Effect((1 / (1 + share), 1.0), -copy_bytes, basis=basis), numbers=numbers)

    def apply(self, setup: Setup) -> Setup:
        assert isinstance(setup.objective, comparing.Comparing)
        return replace(setup, objective=replace(setup.objective, reference=comparing.StoredReference()))

    def confirm(self, setup: Setup) -> None:
        found = getattr(setup.objective, "reference", None)
        if not isinstance(found, comparing.StoredReference):
            raise NotApplied(f"stored_reference: the objective {setup.objective.name} has the reference {type(found).__name__}")
