"""The training loop, and the loss on held-out text. They know no technique by name.

The loss is summed over the objective's units (trained tokens) and divided by the units of the whole optimizer step, so every
split into micro-batches gives the same update. Nothing in here waits for the device: losses and norms are yielded as tensors,
and whoever wants the numbers reads them when it has to.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from powertrain.data.example import Example
from powertrain.data.order import pass_seed
from powertrain.models.adapters.attached import penalty_of
from powertrain.models.model import evaluating
from powertrain.records import Batch, NotApplied, Plan
from powertrain.records.events import Evaluated
from powertrain.training.guard import Guard
from powertrain.training.memory import passes, step_ledger
from powertrain.training.objective import Sums
from powertrain.training.ranks import ALONE, Ranks
from powertrain.training.schedule import Schedule
from powertrain.training.setup import COMMUNICATION, Lap, Laps, MicroBatches, Setup, changed_fields, load_when_needed, no_lap
from powertrain.training.sharded import Sharding
from powertrain.training.updates import RunOptimizer

APART = 1e-2                 # of losses and norms of the same passes, summed in another order, with products in bf16


def apply_plan(setup: Setup, plan: Plan) -> Setup:
    """Return `setup` with every technique of the plan in force. Raises NotApplied where one is not.

    The process-wide settings are entered here, between applying and confirming.
    """
    for step in plan.steps:
        changed = step.technique.apply(setup)
        moved = changed_fields(setup, changed)
        if not moved <= step.technique.touches:
            raise AssertionError(f"{step.technique.name} changed {sorted(moved - step.technique.touches)}, "
                                 "which it does not list in `touches`")
        setup = changed
    for enter_setting in setup.runtime:
        enter_setting()
    for step in plan.steps:                  # after all: a later technique may have undone an earlier one
        try:
            step.technique.confirm(setup)
        except NotApplied as error:
            raise error.confirming(step.technique.name) from None
    return setup


@dataclass
class State:
    """What a run changes as it goes, and what a checkpoint holds."""

    model: nn.Module
    optimizer: RunOptimizer
    scaler: torch.amp.GradScaler
    clipped_steps: Tensor                    # () int64 on the device
    step: int = 0                            # optimizer steps done
    trained_tokens: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> loss on held-out text
    updating: bool = False                   # in the midst of what cannot be repeated: the update, and the exchange before it
    guard: Guard | None = None               # None: every update is made

    @property
    def batch(self) -> int:
        """Return the number (from 0), in the order of the data, of the batch that the next step reads."""
        return self.step + (self.guard.passed_over if self.guard else 0)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, with its figures still on the device."""

    step: int                                # from 1
    loss: Tensor                             # () fp32, mean over the step's units: trained tokens
    grad_norm: Tensor                        # () fp32, before clipping
    trained_tokens: int
    real_tokens: int
    padding_tokens: int
    own_tokens: int                          # that this process computed, padding included
    learning_rate: float
    laps: Laps                               # what the step's time went into
    metrics: Sums                            # of the objective, each () fp32, mean over the step's units
    terms: Mapping[int, Tensor]              # of the loss, () fp32: those of this process's passes, by the pass's place
    batch: int                               # its number in the order of the data, from 0
    bad: Tensor | None = None                # () bool: the update was not made; None without a guard


def new_state(setup: Setup, weight_decay: float) -> State:
    """Return the state before the first step."""
    optimizer = setup.optimizer(setup.model, weight_decay)
    if isinstance(setup.sharding, Sharding):
        optimizer = setup.sharding.optimizer(setup, optimizer)
    scaler = torch.amp.GradScaler(setup.device.type, enabled=setup.precision.loss_scaling)
    return State(setup.model, optimizer, scaler, torch.zeros((), dtype=torch.int64, device=setup.device))


def train(setup: Setup, state: State, schedule: Schedule, max_grad_norm: float) -> Iterator[StepResult]:
    """Go on from `state` to the schedule's last step, yielding after each optimizer step.

    Between the passes and the update there is one place where gradients, loss and metrics become those of all processes. Where
    memory runs out in a pass, of any process, PassTooLarge is raised in all of them; weights and optimizer are untouched then.
    """
    setup.model.train()
    laps = Laps(setup.device)
    batches = range(state.batch, state.batch + schedule.total_steps - state.step)
    for loaded in setup.loader(setup.prepare, batches, setup.device):
        lap_exchange = laps.lap if setup.ranks.world > 1 else no_lap
        laps.lap("data")
        learning_rate = schedule.at(state.step)
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_factor"]
        own = counts_of(setup, loaded)
        units, trained, real, padding = setup.ranks.of_step(*own)
        lap_exchange(COMMUNICATION)
        means = zero_means(setup)
        terms: dict[int, Tensor] = {}
        with passes(setup.ranks):
            micro_batches = [batch.to(setup.device) for batch in loaded]     # those that are there already stay
            laps.lap("copy")
            micro_batches = setup.settled(micro_batches)
            if setup.run_passes is not None:
                means, terms = setup.run_passes(setup, state.step, micro_batches, units, state.scaler, laps.lap)
                micro_batches = []           # a schedule has run them all
            for batch, counts in setup.ranks.abreast(micro_batches, setup.spare):
                seed_pass(setup, state.step, batch)
                of_pass = setup.run_pass(setup, batch, units if counts else math.inf, state.scaler, laps.lap)
                add(means, of_pass)
                if counts:
                    terms[batch.place] = of_pass["loss"].clone()     # where passes are replayed, the next overwrites it
            add_penalty(setup, state.scaler, laps.lap)
            setup.ranks.check_room(setup.model.parameters())
        state.updating = setup.ranks.world > 1           # from here on a process alone cannot repeat the step
        setup.ranks.sum_step(setup.model.parameters(), means.values())
        lap_exchange(COMMUNICATION)
        grad_norm = update(state, max_grad_norm, setup.ranks, means["loss"])
        laps.lap("optimizer")
        state.step += 1
        state.trained_tokens += trained
        loss = means.pop("loss")
        yield StepResult(state.step, loss, grad_norm, trained, real, padding, sum(own[-2:]), learning_rate, laps, means, terms,
                         state.batch - 1, state.guard.bad if state.guard else None)
        laps = Laps(setup.device)


def seed_pass(setup: Setup, step: int, batch: Batch) -> None:
    """Let what a pass of a step (from 0) draws depend on seed, step and pass alone, in whichever process it runs."""
    seed = pass_seed(setup.seed, step, batch.place)
    if setup.device.type == "cpu":           # torch.manual_seed notes the whole stack for each other device that it may find
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def counts_of(setup: Setup, micro_batches: MicroBatches) -> tuple[int, int, int, int]:
    """Return the objective's units and the trained, real and padding tokens of this process's part of a step."""
    return (sum(setup.objective.units(batch) for batch in micro_batches), sum(batch.trained_tokens for batch in micro_batches),
            sum(batch.real_tokens for batch in micro_batches), sum(batch.padding_tokens for batch in micro_batches))


def zero_means(setup: Setup) -> Sums:
    """Return the loss and metrics of a step before its first pass."""
    return {name: torch.zeros((), device=setup.device) for name in ("loss", *setup.objective.metrics)}


def add(means: Sums, of_pass: Sums) -> None:
    """Add the terms of one pass."""
    for name, value in of_pass.items():
        means[name] += value


def add_penalty(setup: Setup, scaler: torch.amp.GradScaler, lap: Lap) -> None:
    """Add the gradients of the model's penalty, if it has one, to `.grad`. It is a term of the first process alone."""
    if setup.ranks.is_writer and (penalty := penalty_of(setup.model)) is not None:
        scaler.scale(penalty).backward()  # type: ignore[no-untyped-call]
        lap("backward")


def backward(setup: Setup, scaler: torch.amp.GradScaler, micro_batches: MicroBatches, units: float) -> Sums:
    """Compute the gradients of a step without its update, into `.grad`; return this process's terms of loss and metrics.

    `units` are those of the whole step.
    """
    means, micro_batches = zero_means(setup), setup.settled(micro_batches)
    if setup.run_passes is not None:
        means, micro_batches = setup.run_passes(setup, 0, micro_batches, units, scaler, no_lap)[0], []
    for batch, counts in setup.ranks.abreast(micro_batches, setup.spare):
        seed_pass(setup, 0, batch)
        add(means, setup.run_pass(setup, batch, units if counts else math.inf, scaler, no_lap))
    add_penalty(setup, scaler, no_lap)
    return means


def update(state: State, max_grad_norm: float, ranks: Ranks = ALONE, loss: Tensor | None = None) -> Tensor:
    """Clip, step, clear; return the gradient's norm before clipping, () on the device. A guard judges the step's `loss` too."""
    optimizer = state.optimizer
    optimizer.gather()
    state.scaler.unscale_(optimizer)
    norm = optimizer.clip(max_grad_norm, ranks)
    if max_grad_norm > 0:
        state.clipped_steps += norm > max_grad_norm
    state.updating = True
    if state.guard is None or loss is None:
        state.scaler.step(optimizer)
    else:
        optimizer.step_unless(state.guard.judge(loss, norm, loss_scaling=state.scaler.is_enabled()))
    state.updating = False
    state.scaler.update()
    optimizer.follow(state.step + 1)
    optimizer.zero_grad(set_to_none=True)
    return norm


def measured_step_bytes(setup: Setup, state: State, max_grad_norm: float = 1.0) -> int:
    """Return the real peak of one optimizer step after the first, with weights, moments and all.

    It takes that step, and a first one where the optimizer has no state yet, so `state` moves on by one or two steps.
    """
    group = state.optimizer.param_groups[0]
    schedule = Schedule("constant", group["lr"] / group["lr_factor"], state.step + 2)
    steps = train(replace(setup, loader=load_when_needed), state, schedule, max_grad_norm)
    if not state.optimizer.state:
        next(steps)
    with step_ledger(setup.device, setup.model, state.optimizer, setup.objective.held) as ledger:
        next(steps)
    return ledger.peak_bytes


# ------------------------------------------------------------------------------------------------ held-out loss


def evaluate(setup: Setup, examples: Sequence[Example], *, tokens_per_byte: float | None,
             before_batch: Callable[[], None] = lambda: None) -> Evaluated:
    """Return the mean loss over `examples`, which must not be empty, and the objective's metrics, as an event without its step.

    It has the precision and kernels of training, no dropout, and the same tokens every time.
    `tokens_per_byte` of the text turns nats per token into bits per byte; None where it is not known.
    """
    started = time.perf_counter()
    found: list[Sums] = []             # on the device, so that nothing waits for it batch by batch
    units = 0
    with evaluating(setup.model), torch.no_grad(), passes(setup.ranks):
        for first in range(0, len(examples), setup.train_batch_size):
            before_batch()
            last = min(first + setup.train_batch_size, len(examples))
            passes_of_batch = [batch.to(setup.device) for batch in setup.passes([examples[i] for i in range(first, last)])]
            for batch, counts in setup.ranks.abreast(setup.settled(passes_of_batch), setup.spare):
                of_pass = setup.held_out(batch)
                if counts:
                    found.append(of_pass)
                    units += setup.objective.units(batch)
    names = ("loss", *setup.objective.held_out_metrics)
    sums = torch.stack([torch.stack([of_pass[name] for name in names]) for of_pass in found]).cpu().double().sum(0) \
        if found else torch.zeros(len(names))
    totals = setup.ranks.total(*sums.tolist())
    (units,) = setup.ranks.of_step(units)
    loss, *metrics = (total / units for total in totals)
    bits_per_byte = None if tokens_per_byte is None else loss * tokens_per_byte / math.log(2)
    return Evaluated(loss=loss, tokens=units, bits_per_byte=bits_per_byte, seconds=time.perf_counter() - started,
                     metrics=dict(zip(names[1:], metrics, strict=True)))


def spread(examples: Sequence[Example], most: int | None) -> Sequence[Example]:
    """Return at most `most` of the examples, evenly spaced over the whole text, the same ones every time."""
    if most is None or len(examples) <= most:
        return examples
    return [examples[i * len(examples) // most] for i in range(most)]


# ------------------------------------------------------------------------------------------------ held against one process


def first_passes(setup: Setup, processes: int) -> tuple[MicroBatches, float]:
    """Return this process's passes of the run's first examples, of which there are enough for all, and their units."""
    examples = setup.examples_of(0)[:processes * setup.micro_batch]
    batches = [batch.to(setup.device) for batch in setup.passes(examples)]
    return batches, sum(setup.objective.units(batch) for batch in batches)


def run_first_passes(setup: Setup, processes: int, weights: Iterable[nn.Parameter] = ()) -> float:
    """Run these passes forward and backward, and sum the gradients of `weights`; return the loss, of all processes."""
    batches, units = first_passes(setup, processes)
    means = backward(setup, torch.amp.GradScaler(setup.device.type, enabled=False), batches, setup.ranks.total(units)[0])
    setup.ranks.sum_step(weights, means.values())
    return means["loss"].item()


def check_alike(step: str, norm: str, expected: tuple[float, float], found: tuple[float, float]) -> None:
    """Raise NotApplied where loss or norm of a step are not those of one process."""
    for what, one, other in zip(("a loss", norm), expected, found, strict=True):
        if not abs(one - other) <= APART * one:
            raise NotApplied(f"{step} has {what} of {other:.4g}, and that of one process is {one:.4g}")
