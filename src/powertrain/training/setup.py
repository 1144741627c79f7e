"""Everything that a training step needs, as one value of which techniques return changed copies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from powertrain.data.example import Example
from powertrain.data.order import Order, step_examples
from powertrain.models.decoder import run_plainly
from powertrain.models.kernels.attention import Attention, math_attention
from powertrain.models.kernels.losses import Loss, token_loss
from powertrain.models.model import Model, RunBlock
from powertrain.records import Batch
from powertrain.training.objective import Kernels, Objective, Sums
from powertrain.training.objectives import NEXT_TOKEN
from powertrain.training.optimizers import Optimizer
from powertrain.training.ranks import ALONE, Ranks
from powertrain.training.sharded import Sharding, is_divided, own_part
from powertrain.training.tensor_parallel import TensorParallel

T = TypeVar("T")
PARTS = ("data", "copy", "forward", "backward", "optimizer")
COMMUNICATION = "communication"              # a part of steps that processes share: the sums, and the wait for the others
Lap = Callable[[str], None]                  # the time since the last lap belongs to this part
MicroBatches = list[Batch]                   # one optimizer step's batch, split
Prepare = Callable[[int], MicroBatches]      # optimizer step (from 0) -> its batch, on the host
Arrange = Callable[[Sequence[Example], int], list[list[Example]]]    # (a step's examples, micro_batch) -> its passes
RunPass = Callable[["Setup", Batch, float, torch.amp.GradScaler, Lap], Sums]       # see run_eagerly
# (setup, step from 0, its passes, its units, scaler, lap) -> this process's means, and the loss terms of passes by their place
RunPasses = Callable[["Setup", int, MicroBatches, float, torch.amp.GradScaler, Lap], tuple[Sums, dict[int, Tensor]]]


def fastest_device() -> torch.device:
    """Return the device on which a run would train: CUDA, MPS or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


@dataclass(frozen=True)
class Precision:
    """The type that matrix products are computed in. Master weights, their gradients and the optimizer stay fp32."""

    compute_dtype: torch.dtype = torch.float32
    loss_scaling: bool = False               # fp16 gradients below 6e-8 would vanish

    def context(self, device: torch.device, *, keeps_copies: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Return autocast, which keeps its copies of trained weights until it ends; else it makes them anew for each use."""
        if self.compute_dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype, cache_enabled=keeps_copies)


class Laps:
    """The stopwatch of one step: data, copy, forward, backward, optimizer, and communication where processes share the step.

    The parts of a step sum to its time.

    On a CPU a lap is the host's time. A GPU works behind the host, so there a lap is the time between two events on the
    device's own stream: `data` is what the device waited for, not what the host took. Nothing in here makes the host wait;
    whoever reads the laps of a GPU does so after it has waited for the step.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def lap(self, part: str) -> None:
        self._marks.append((part, self._now()))

    def parts(self) -> Mapping[str, float]:
        """Return the seconds of each part. Raises RuntimeError on a GPU that has not come to the last lap yet."""
        found = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            seconds = after - before if self._device.type == "cpu" else before.elapsed_time(after) / 1e3
            found[part] = found.get(part, 0.0) + seconds
        return found

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = getattr(torch, self._device.type).Event(enable_timing=True)      # torch.cuda.Event, torch.mps.Event
        event.record()
        return event


def no_lap(part: str) -> None:
    """Measure nothing."""


def as_collated(batch: Batch) -> Batch:
    """Return the batch as it is."""
    return batch


def run_eagerly(setup: Setup, batch: Batch, units: float, scaler: torch.amp.GradScaler, lap: Lap) -> Sums:
    """Add the gradients of one pass's loss to `.grad`; return its loss and metrics. All are divided by the step's `units`."""
    with setup.in_its_precision():
        sums = setup.objective.sums(setup.model, batch, setup.kernels, setup.loss)
    means = {name: value / units for name, value in sums.items()}
    lap("forward")
    scaler.scale(means["loss"]).backward()  # type: ignore[no-untyped-call]
    lap("backward")
    return {name: value.detach() for name, value in means.items()}


class Trial(NamedTuple):
    """What a pass, forward and backward, has shown."""

    nodes: Counter[str]                      # of the loss's graph, by name
    recorded: frozenset[int]                 # blocks, called as modules, whose output has a gradient
    given: frozenset[str]                    # weights that got a gradient


@dataclass(frozen=True)
class Setup:
    model: Model                             # on `device`; what is trained in it is fp32
    device: torch.device
    examples: Sequence[Example]              # one epoch, in the order of the store
    train_batch_size: int                    # examples per optimizer step
    seed: int
    micro_batch: int                         # examples per forward pass
    arrange: Arrange
    collate: Callable[[Sequence[Example]], Batch]
    loader: Callable[[Prepare, range, torch.device], Iterator[MicroBatches]]
    attention: Attention
    run_block: RunBlock
    loss: Loss                               # how the objective's loss of rows is computed
    precision: Precision
    optimizer: Optimizer
    objective: Objective = NEXT_TOKEN
    order: Order = "keyed"                   # of an epoch's examples
    runtime: tuple[Callable[[], None], ...] = ()         # settings of the whole process, entered once: a run is one process
    lay_out: Callable[[Batch], Batch] = as_collated      # adds what `run_pass` wants to know of a batch, on the host
    run_pass: RunPass = run_eagerly
    run_passes: RunPasses | None = None      # of a step; None: one after the other, each by `run_pass`
    ranks: Ranks = ALONE                     # this process's part of the run
    sharding: Sharding | TensorParallel | None = None    # how processes divide the weights; None: each has all of them
    as_stage: Callable[[Setup, Ranks], Setup] | None = None      # where each process has blocks of its own: see pipeline.py
    code: Path | None = None                 # folder where machine code is kept for later processes; None: nowhere

    def prepare(self, step: int) -> MicroBatches:
        """Return this process's passes of optimizer step `step` (from 0): a pure function of the seed and the step.

        Every process arranges the whole step and takes its share of the passes; the share may be empty.
        """
        return self.passes(self.examples_of(step))

    def passes(self, examples: Sequence[Example]) -> MicroBatches:
        """Return this process's share of the forward passes that these examples take."""
        parts = list(enumerate(self.arrange(examples, self.micro_batch)))
        shared = self.ranks.share(parts, [sum(example.tokens for example in part) for _, part in parts])
        totals = self.objective.totals(examples)
        return [dataclasses.replace(self.lay_out(self._batch(part, totals)), place=place) for place, part in shared]

    def examples_of(self, step: int) -> list[Example]:
        """Return the examples of optimizer step `step` (from 0)."""
        return [self.examples[index] for index in self.numbers_of(step)]

    def numbers_in(self, step: int, places: Collection[int]) -> list[int]:
        """Return the indices in `examples` of what these passes of optimizer step `step` (from 0) have."""
        examples = self.examples_of(step)
        parts = self.arrange(examples, self.micro_batch)
        wanted = {id(example) for place in places for example in parts[place]}
        return [number for number, example in zip(self.numbers_of(step), examples, strict=True) if id(example) in wanted]

    def numbers_of(self, step: int) -> list[int]:
        """Return the indices in `examples` of what optimizer step `step` (from 0) has."""
        return [int(index) for index in step_examples(self.seed, step, self.train_batch_size, len(self.examples),
                                                       self.order)]

    def batch_of(self, examples: Sequence[Example]) -> Batch:
        """Return one batch of these examples' documents."""
        return self._batch(examples, self.objective.totals(examples))

    def _batch(self, examples: Sequence[Example], totals: Any) -> Batch:
        batch = self.collate([document for example in examples for document in self.objective.documents(example)])
        return self.objective.told(batch, examples, totals)

    def shared_by(self, ranks: Ranks) -> Setup:
        """Return the setup of one of the processes that share the run."""
        if self.as_stage is not None:
            return self.as_stage(self, ranks)
        return dataclasses.replace(self, ranks=ranks if self.sharding is None else self.sharding.ranks(self.model, ranks))

    def spare(self) -> Batch:
        """Return a small pass on the device, the same in every process, for one that has fewer passes than the others."""
        return dataclasses.replace(self, ranks=ALONE).few_tokens(1).to(self.device)

    def few_tokens(self, at_least: int, *, examples: int = 2) -> Batch:
        """Return a small pass for compiling and profiling, of the first step's shortest examples, so many or more."""
        ordered = sorted(self.examples_of(0), key=lambda example: example.tokens)
        return self.passes(_reaching(ordered, at_least, examples=examples))[0]

    def try_pass(self, few: Batch) -> Trial:
        """Train on a small pass, without an update, and leave no gradient behind."""
        recorded: set[int] = set()
        with contextlib.ExitStack() as watching:
            for index, block in enumerate(self.model.get_submodule("blocks").children()):
                watching.enter_context(block.register_forward_hook(
                    lambda module, inputs, output, index=index: recorded.add(index) if output.requires_grad else None))
            loss = self.batch_loss(few.to(self.device))
        nodes = _nodes_of(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        given = frozenset(name for name, parameter in self.model.named_parameters() if parameter.grad is not None)
        self.model.zero_grad(set_to_none=True)
        return Trial(nodes, frozenset(recorded), given)

    def run_one_pass(self) -> None:
        """Run the first micro-batch forward and backward, and leave no gradient behind."""
        self.batch_loss(self.prepare(0)[0].to(self.device)).backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)

    @functools.cached_property
    def trial(self) -> Trial:
        """Return what a pass of the first step's shortest example has shown, for all techniques that want to know."""
        return self.try_pass(dataclasses.replace(self, ranks=ALONE).few_tokens(1, examples=1))

    def apart(self, run_pass: RunPass, other: RunPass, batch: Batch) -> tuple[float, float]:
        """Return how far two ways to run a pass are apart, in all gradients and in the loss, as shares of the other's.

        A loss counts as a tenth of a nat at least: nearer to zero it is rounding that differs. Each runs twice, so gradients
        have to add up. No gradient is left behind.
        """
        (gradients, loss), (expected, expected_loss) = (self._taken_by(run, batch) for run in (run_pass, other))
        return (float((gradients - expected).norm() / expected.norm().clamp(min=1e-30)),
                abs(loss - expected_loss) / max(abs(expected_loss), 0.1))

    def _taken_by(self, run_pass: RunPass, batch: Batch) -> tuple[Tensor, float]:
        scaler = torch.amp.GradScaler(self.device.type, enabled=False)
        self.model.zero_grad(set_to_none=True)
        losses = [float(run_pass(self, batch, batch.trained_tokens, scaler, no_lap)["loss"]) for _ in range(2)]
        gradients = torch.cat([parameter.grad.detach().float().flatten() for parameter in self.model.parameters()
                               if parameter.grad is not None])
        self.model.zero_grad(set_to_none=True)
        return gradients, losses[1]

    def try_out(self, tokens: int) -> None:
        """Run the blocks forward once, without a gradient, over the first step's first examples of `tokens` or a bit more."""
        with torch.no_grad(), self.precision.context(self.device):
            self.model.hidden(self.batch_of(_reaching(self.examples_of(0), tokens)).to(self.device))

    def runner(self, kind: type[T]) -> T | None:
        """Return the runner of blocks of this kind among those that are wrapped around each other."""
        run_block: Any = self.run_block
        while not isinstance(run_block, kind) and hasattr(run_block, "inner"):
            run_block = run_block.inner
        return run_block if isinstance(run_block, kind) else None

    def product_dtype(self) -> torch.dtype:
        """Return the dtype that the model's matrix products come out in, tried on one row.

        bitsandbytes' own 4-bit linear gives its input's dtype back, whatever it computes in, and tells nothing.
        """
        linear = next(module for module in self.model.modules() if isinstance(module, nn.Linear)
                      and (module.weight is None or module.weight.is_floating_point()))
        row = torch.zeros(1, linear.in_features, device=self.device)
        with torch.no_grad(), self.precision.context(self.device):
            divided = is_divided(linear.weight)
            product: Tensor = nn.functional.linear(row, own_part(linear.weight)) if divided else linear(row)
        return product.dtype

    def sums(self, batch: Batch) -> Sums:
        """Return the objective's loss and metrics, summed over the batch's units, computed in the setup's precision."""
        with self.in_its_precision():
            return self.objective.sums(self.model, batch, self.kernels, self.loss)

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the loss that training minimises, () fp32, summed over the batch's units."""
        return self.sums(batch)["loss"]

    def settled(self, batches: MicroBatches) -> MicroBatches:
        """Return a step's batches, on the device, with what the objective computes of the whole step before its passes."""
        with self.in_its_precision():
            return self.objective.settle(self.model, batches, self.kernels, self.loss, self.ranks, self.spare)

    def held_out(self, batch: Batch) -> Sums:
        """Return what evaluation reports, each () fp32, summed over the batch's units."""
        with self.in_its_precision():
            return self.objective.held_out(self.model, batch, self.kernels, self.loss)

    def in_its_precision(self) -> contextlib.AbstractContextManager[Any]:
        """Return the precision's context. Where weights are divided, copies would outlast the weights that are gathered."""
        return self.precision.context(self.device, keeps_copies=not isinstance(self.sharding, Sharding))

    @property
    def kernels(self) -> Kernels:
        """Return how the model's hidden states are computed: the keywords of Model.hidden."""
        return {"attention": self.attention, "run_block": self.run_block}


def plain_setup(model: Model, examples: Sequence[Example], collate: Callable[[Sequence[Example]], Batch], *,
                train_batch_size: int, seed: int, optimizer: Optimizer, objective: Objective = NEXT_TOKEN,
                order: Order = "keyed", code: Path | None = None) -> Setup:
    """Return the setup with no technique in force: fp32, one micro-batch, eager, batches made when they are needed.

    `collate` is the plain one for the data: collate_padded where a causal model's examples differ in length.
    """
    return Setup(model=model, device=next(model.parameters()).device, examples=examples,
                 train_batch_size=train_batch_size, seed=seed, micro_batch=train_batch_size, arrange=in_order, collate=collate,
                 loader=load_when_needed, attention=math_attention, run_block=run_plainly, loss=token_loss,
                 precision=Precision(), optimizer=optimizer, objective=objective, order=order, code=code)


def _nodes_of(loss: Tensor) -> Counter[str]:
    """Return how many nodes of each name the graph of the loss has."""
    seen, open_nodes = set(), [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_nodes += [following for following, _ in node.next_functions]
    return Counter(node.name() for node in seen)


def _reaching(ordered: Sequence[Example], tokens: int, *, examples: int = 1) -> Sequence[Example]:
    """Return the first of the examples that have so many tokens together, and at least so many of them."""
    sums = accumulate(example.tokens for example in ordered)
    needed = next((count for count, held in enumerate(sums, start=1) if held >= tokens), len(ordered))
    return ordered[:max(needed, examples)]


def in_order(examples: Sequence[Example], micro_batch: int) -> list[list[Example]]:
    """Return passes of `micro_batch` examples each; the last one has what is left."""
    return [list(examples[first:first + micro_batch]) for first in range(0, len(examples), micro_batch)]


def load_when_needed(prepare: Prepare, steps: range, device: torch.device) -> Iterator[MicroBatches]:
    """Yield each step's batches on the host; the loop copies them to the device."""
    for step in steps:
        yield prepare(step)


def changed_fields(before: Setup, after: Setup) -> set[str]:
    return {field.name for field in dataclasses.fields(Setup)
            if getattr(before, field.name) is not getattr(after, field.name)}
