"""Tensor parallelism: neighbouring processes divide the matrices of each block, and compute every pass together."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from powertrain.cost.sharding import standing_bytes
from powertrain.records import Effect, ModelFacts, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import TOO_LARGE, Exactness, Need, PlannedRun, Setup, Technique
from powertrain.training.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class TensorParallel(Technique):
    """Each of `degree` processes keeps whole heads of the attention and columns of the MLP, and computes with these alone.

    Two sums a block forward and two backward make the block's result that of one process up to rounding. It saves the memory of
    activations inside the blocks besides that of weights, and exchanges the residual of every token in every block, so the
    processes should be on one machine with a fast link. The groups of `degree` processes share the passes of a step.
    """

    processes: int = 2
    degree: int = 2

    name = "tensor_parallel"
    does = "divides the matrices of each block among processes that compute each pass together"
    decides_by: ClassVar = {"tensor_degree": "degree"}
    native_only = True
    for_several = TOO_LARGE
    needs_all_trained = True
    asked_first = True                       # techniques that need whole weights refuse beside it
    exactness = Exactness.ROUNDING
    touches = frozenset({"sharding", "runtime"})
    slots = frozenset({"processes"})
    source = "Shoeybi et al. 2019, arXiv:1909.08053 (Megatron-LM)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree < 2 or self.processes % self.degree:
            raise ValueError(f"techniques.tensor_parallel.degree={self.degree} does not divide {self.processes} processes "
                             "into groups of 2 or more")

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        processes = run.hardware.processes
        if (reason := _cannot_be_divided(run)) is not None:
            return cls.refuse(Why.CONFLICT, reason)
        degrees = [degree for degree in range(2, processes + 1)
                   if processes % degree == 0 and not _left_over(run.model, degree, processes)]
        if not degrees:
            return cls.refuse(Why.CONFLICT, _left_over(run.model, processes, processes))
        needed, sharded = standing_bytes(run.model, run.optimizer), _need(run)
        held = Need(needed, sharded.room_bytes)
        shown, possible = f"weights, gradients and optimizer state take {held}", cls(processes, degrees[-1])
        numbers = held.numbers
        if held.is_met:
            return cls.refuse(Why.NOT_NEEDED, f"{shown}, so each process can hold them; sums in every block would only "
                              "cost time", possible, numbers=numbers)
        divided = {degree: _need(run, shards=1, sharded_stage=0, tensor_degree=degree) for degree in degrees}
        degree = next((degree for degree in degrees if divided[degree].is_met), degrees[-1])
        if run.decided.shards > 1 and (sharded.is_met or not divided[degree].is_met):
            return cls.refuse(Why.NOT_NEEDED, f"{shown}; with sharding, which exchanges less, one example needs {sharded}",
                              possible, rival="sharding", numbers=numbers)
        return cls(processes, degree).on(
            f"{shown}; where {degree} processes divide the matrices of each block, one example needs {divided[degree]}",
            Effect((1 / processes, 1.5), -(needed - needed // degree), guessed=True,
                   basis="guess: time not measured yet; memory: of weights, gradients and optimizer state"), numbers)

    def unmet(self, run: PlannedRun) -> Refusal | None:
        """Return why the degree that the recipe sets does not divide the model."""
        reason = _left_over(run.model, self.degree, self.processes)
        return self.refuse(Why.CONFLICT, reason) if reason else None

    def apply(self, setup: Setup) -> Setup:
        from powertrain.training.ranks import joined
        from powertrain.training.tensor_parallel import TensorParallel as Division

        division = Division(self.degree)

        def divide() -> None:
            """Divide the model, and keep what one process comes to before that."""
            division.alone = _figures(setup, joined().world)
            division.divide(setup.model)  # type: ignore[arg-type]

        return replace(setup, sharding=division, runtime=(*setup.runtime, divide))

    def confirm(self, setup: Setup) -> None:
        """Look at what this process holds, and compare a divided step's loss and a block's norm with those of one process."""
        from powertrain.training.loop import check_alike
        from powertrain.training.ranks import joined_as_planned
        from powertrain.training.sharded import whole_shape

        ranks = joined_as_planned(self.name, self.processes)
        wrong = [name for name, weight in setup.model.get_submodule("blocks").named_parameters()
                 if weight.dim() > 1 and self.degree * weight.numel() != math.prod(whole_shape(weight))]
        if wrong:
            raise NotApplied(f"tensor_parallel: this process does not hold 1 / {self.degree} of {', '.join(wrong[:3])}")
        expected = getattr(setup.sharding, "alone", None)
        assert expected is not None
        check_alike("tensor_parallel: a divided step", "the norm of a block's gradients", expected,
                    _figures(setup.shared_by(ranks), self.processes))


def _cannot_be_divided(run: PlannedRun) -> str | None:
    """Return why the blocks or the update of this run cannot be divided, or None."""
    model, row = run.model, OPTIMIZERS.named(run.optimizer.name)
    if run.decided.replayed:
        return "cuda_graph replays recorded passes, and the sums over the processes are not in the recording"
    if model.adapter_parameters:
        return f"method={model.method} trains adapters on frozen matrices, which it does not divide; use " \
               "techniques.sharding=on, or method=full"
    if model.dropout:
        return f"dropout ({model.dropout:g}) draws for each head of the attention, so a process with some of the heads would " \
               "draw other numbers; use model.dropout=0"
    if not row.can_be_flat:
        return f"the recipe's optimizer {row.name} does not update each weight's elements one by one; use optimizer=adamw"
    return None


def _left_over(model: ModelFacts, degree: int, processes: int) -> str:
    """Return the sentence for a degree that does not divide the model's heads or MLP; "" for one that does."""
    counts = {"heads": model.heads, "kv heads": model.kv_heads, "columns of the MLP": model.mlp_width}
    wrong = next((name for name, count in counts.items() if count % degree), None)
    if wrong is None:
        return ""
    fitting = [str(one) for one in range(2, model.heads + 1) if not any(count % one for count in (processes, *counts.values()))]
    cure = f"techniques.tensor_parallel.degree={' or '.join(fitting)}" if fitting else "techniques.sharding=on"
    return f"{degree} processes cannot divide the {counts[wrong]:,} {wrong} of each block evenly; use {cure}"


def _need(run: PlannedRun, **changes: int) -> Need:
    """Return what one example needs in a process with the fewest activations: each block recomputes its own."""
    return run.need(run.one_example(checkpoint_every=1, attention_saves_scores=False, **changes))


def _figures(setup: Setup, examples: int) -> tuple[float, float]:
    """Return the loss of the first step's first examples, of all processes, and the norm of the last block's gradients."""
    from powertrain.training.loop import run_first_passes
    from powertrain.training.sharded import total_norm

    weights = list(list(setup.model.get_submodule("blocks").children())[-1].parameters())
    with _training_only(setup.model, weights):
        loss = run_first_passes(setup, examples, weights)
        norm = total_norm(weights).item()
        setup.model.zero_grad(set_to_none=True)
    return loss, norm


@contextlib.contextmanager
def _training_only(model: Any, weights: list[Any]) -> Iterator[None]:
    """Compute gradients of some weights alone inside: those of all of them may not fit before the model is divided."""
    others = {weight for weight in model.parameters() if weight.requires_grad} - set(weights)
    for weight in others:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in others:
            weight.requires_grad_(True)
