"""A decoder whose blocks are divided into stages, one for each process: torch's pipeline schedule runs a step's passes.

The first process has the embedding and the lowest blocks, the last one the highest blocks, norm and head. Each sends what its
blocks give to the next one, and gradients go the other way. In the schedule 1F1B a stage goes on to further passes while the
others work, and begins the backward pass of each as soon as it can: with P passes and S stages, a process waits for
(S - 1) / (P + S - 1) of a step. A process holds the activations of at most S passes of its own blocks at once.

The buffers of torch's schedule have one shape, so the passes of a step are filled up to the length of the longest one, with
tokens that train nothing. A step with fewer passes than stages gets passes of nothing else.
Source: Narayanan et al. 2019, "PipeDream"; Narayanan et al. 2021, arXiv:2104.04473; torch.distributed.pipelining.Schedule1F1B.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from powertrain.models.decoder import Decoder
from powertrain.models.kernels.losses import Terms
from powertrain.models.model import Model
from powertrain.records import IGNORE, Batch
from powertrain.training.loop import add, seed_pass, zero_means
from powertrain.training.objective import Sums
from powertrain.training.ranks import GroupRanks, Ranks
from powertrain.training.setup import COMMUNICATION, Lap, MicroBatches, Prepare, Setup

T = TypeVar("T")
FIRST, LAST = ("embedding", "position_embedding"), ("norm", "head")      # parts of a decoder outside its blocks


class Staged(Decoder):
    """A decoder of which this process computes one stage. `into_stages` makes it of a whole one.

    Outside of a schedule, `hidden` waits for the stage before and sends to the one after, so all processes have to call it.
    Only what it returns on the last stage is the head's input.
    """

    stage: int
    stages: int
    elsewhere: Mapping[str, nn.Module]       # name -> a part that other stages compute, without memory
    alone: tuple[float, float] = (0.0, 0.0)  # figures of a few passes by the whole model; see the technique's `confirm`
    given: Tensor | None = None              # what the schedule has had from the stage before
    is_scheduled: bool = False

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def embed(self, batch: Batch) -> Tensor:
        """Return what this stage's blocks read (T, width) fp32."""
        if self.stage == 0:
            return super().embed(batch)
        if self.given is not None:
            return self.given
        x = torch.empty(len(batch.tokens), self.config.width, device=batch.tokens.device)
        torch.distributed.recv(x, src=self.stage - 1)
        return x

    def hidden(self, batch: Batch, **kernels: Any) -> Tensor:
        """Return what the next stage reads (T, width) fp32; on the last stage the head's input."""
        x = super().hidden(batch, **kernels)
        if not (self.is_last or self.is_scheduled):
            torch.distributed.send(x.detach().contiguous(), dst=self.stage + 1)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits as a whole decoder does, on the last stage. Those of one token, (width,), are sent to all stages.

        A sample is drawn from these: each process draws the same, and feeds the token to its blocks.
        """
        if hidden.dim() > 1:
            return super().logits(hidden)
        scores = super().logits(hidden).float() if self.is_last else hidden.new_empty(self.config.vocabulary).float()
        torch.distributed.broadcast(scores, src=self.stages - 1)
        return scores

    @contextlib.contextmanager
    def scheduled(self, given: Tensor | None) -> Iterator[None]:
        """Compute one pass inside, of what a schedule has received and will send."""
        self.given, self.is_scheduled = given, True
        try:
            yield
        finally:
            self.given, self.is_scheduled = None, False


def stage_of(name: str, layers: int, stages: int) -> int:
    """Return the stage that has the weight or part of a decoder with this name."""
    top, *rest = name.split(".")
    if top == "blocks":
        return int(rest[0]) * stages // layers
    assert top in FIRST + LAST, f"{name} belongs to no stage"
    return 0 if top in FIRST else stages - 1


def into_stages(model: nn.Module) -> Staged:
    """Leave this process of torch.distributed's default group the blocks of its stage; free the memory of all others."""
    assert isinstance(model, Decoder)
    stage, stages = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layers, parts = model.config.layers, dict(model.named_modules())
    names = [name for name in (*FIRST, *(f"blocks.{layer}" for layer in range(layers)), *LAST) if name in parts]
    elsewhere = {name: parts[name].to("meta") for name in names if stage_of(name, layers, stages) != stage}
    for name in elsewhere:
        model.set_submodule(name, nn.Identity())
    object.__setattr__(model, "__class__", Staged)
    assert isinstance(model, Staged)
    model.stage, model.stages, model.elsewhere = stage, stages, elsewhere
    return model


def held_elsewhere(model: nn.Module) -> set[str]:
    """Return the names of the trained weights that other stages have."""
    parts = model.elsewhere if isinstance(model, Staged) else {}
    return {f"{name}.{key}" for name, part in parts.items() for key, weight in part.named_parameters() if weight.requires_grad}


@contextlib.contextmanager
def stages_gathered(model: nn.Module, *, keep: bool) -> Iterator[None]:
    """Send the trained weights of all stages to the first process; inside, it is to `keep` them in the model."""
    if not isinstance(model, Staged):
        yield
        return
    device = next(model.parameters()).device
    if not keep:
        for weight in model.parameters():
            if weight.requires_grad:
                torch.distributed.send(weight.detach().contiguous(), dst=0)
    for name, part in model.elsewhere.items() if keep else ():
        source = stage_of(name, model.config.layers, model.stages)
        for key, weight in dict(part.named_parameters()).items():
            if weight.requires_grad:
                value = torch.empty_like(weight, device=device)
                torch.distributed.recv(value, src=source)
                holder, _, of_holder = key.rpartition(".")
                setattr(part.get_submodule(holder), of_holder, nn.Parameter(value.cpu()))
        model.set_submodule(name, part)
    try:
        yield
    finally:
        for name, part in model.elsewhere.items() if keep else ():
            part.to("meta")
            model.set_submodule(name, nn.Identity())


# ------------------------------------------------------------------------------------------------ a process's part of a run


@dataclass(frozen=True)
class StageRanks(GroupRanks):
    """One process of a group, each of which computes one stage of every pass."""

    lockstep: ClassVar[bool] = True
    in_stages: ClassVar[bool] = True

    def share(self, parts: Sequence[T], costs: Sequence[int]) -> list[T]:
        """Return all passes."""
        return list(parts)

    @property
    def shard(self) -> tuple[int, int]:
        return self.rank, self.world

    def norm(self, own: Tensor) -> Tensor:
        squared = own.square()
        self.sum([squared])
        return squared.sqrt()

    def sum_step(self, parameters: Iterable[nn.Parameter], means: Iterable[Tensor]) -> None:
        """Sum the means, which the last stage has: each process has the gradients of its own weights."""
        self.sum(means)


def as_stage(setup: Setup, ranks: Ranks) -> Setup:
    """Return the setup of a process that computes the stage of `setup.model`, which `into_stages` has made."""
    assert isinstance(setup.model, Staged)
    given = {field.name: getattr(ranks, field.name) for field in fields(ranks)}
    return replace(setup, ranks=StageRanks(**given), run_passes=by_schedule,
                   loader=partial(_load_levelled, setup.loader, setup.model.stages),
                   loss=setup.loss if setup.model.is_last else no_loss)


def no_loss(model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None, terms: Terms | None = None) -> Tensor:
    """Return zero in place of the loss that the last stage computes. See losses.Loss."""
    return hidden.new_zeros(() if terms is None else 3)


def _load_levelled(loader: Callable[..., Iterator[MicroBatches]], least: int, prepare: Prepare, steps: range,
                   device: torch.device) -> Iterator[MicroBatches]:
    """Yield each step's passes as the loader does, levelled."""
    return loader(lambda step: levelled(prepare(step), least), steps, device)


def levelled(passes: MicroBatches, least: int) -> MicroBatches:
    """Return a step's passes, all of the same length, and at least so many of them."""
    longest = max(len(batch.tokens) for batch in passes)
    filled = [_filled(batch, longest - len(batch.tokens)) for batch in passes]
    last = filled[-1]
    empty = replace(last, targets=torch.full_like(last.targets, IGNORE), trained_tokens=0, padding_tokens=len(last.tokens))
    return [*filled, *(replace(empty, place=place) for place in range(len(filled), least))]


def _filled(batch: Batch, missing: int) -> Batch:
    """Return the batch with so many tokens of padding at the end, in documents no longer than its longest one."""
    if not missing:
        return batch
    whole, rest = divmod(missing, max(batch.lengths))
    added = (max(batch.lengths),) * whole + ((rest,) if rest else ())
    positions = torch.cat([torch.arange(length) for length in added]).to(batch.positions)
    return replace(batch, tokens=torch.cat([batch.tokens, torch.zeros_like(positions)]),
                   targets=torch.cat([batch.targets, torch.full_like(positions, IGNORE)]),
                   positions=torch.cat([batch.positions, positions]), lengths=(*batch.lengths, *added),
                   padding_tokens=batch.padding_tokens + missing)


# ------------------------------------------------------------------------------------------------ the passes of a step


def by_schedule(setup: Setup, step: int, passes: MicroBatches, units: float, scaler: torch.amp.GradScaler,
                lap: Lap) -> tuple[Sums, dict[int, Tensor]]:
    """Compute the gradients of a step's passes by 1F1B. Return the means of the step's loss and metrics, and each pass's term.

    Only the last stage has them: the means are zero on the others, and there are no terms. See setup.RunPasses.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = setup.model
    assert isinstance(model, Staged)
    passes = levelled(passes, model.stages)
    part = _Part(setup, step, passes, units, scaler)
    between, loss = (torch.empty(shape, device="meta", requires_grad=True)
                     for shape in ((len(passes[0].tokens), model.config.width), ()))
    stage = PipelineStage(part, model.stage, model.stages, setup.device, input_args=() if model.stage == 0 else (between,),
                          output_args=(loss if model.is_last else between,))       # torch 2.11 compares
    run: Any = stage
    run.forward_one_chunk = _timed(stage.forward_one_chunk, lap, "forward")
    run.backward_one_chunk = _timed(stage.backward_one_chunk, lap, "backward")
    schedule = Schedule1F1B(stage, len(passes), loss_fn=lambda loss, _: loss, scale_grads=False)
    numbers = torch.arange(len(passes))
    try:
        schedule.step(number=numbers, target=numbers, return_outputs=False)
    except RuntimeError as error:
        raise error.__cause__ or error from None         # torch puts what a pass raised into another error
    return part.means, part.terms


class _Part(nn.Module):
    """What one stage computes of the passes of a step. Its weights are not registered here: the schedule needs none."""

    def __init__(self, setup: Setup, step: int, passes: MicroBatches, units: float, scaler: torch.amp.GradScaler) -> None:
        super().__init__()
        self.setup, self.step, self.passes, self.units, self.scaler = setup, step, passes, units, scaler
        self.means: Sums = zero_means(setup)
        self.terms: dict[int, Tensor] = {}

    def forward(self, given: Tensor | None = None, *, number: Tensor) -> Tensor:
        """Return what the next stage reads (T, width), or on the last stage the pass's loss () over the step's units.

        `number` (1,) of the pass, on the host.
        """
        setup, batch, model = self.setup, self.passes[int(number)], self.setup.model
        assert isinstance(model, Staged)
        seed_pass(setup, self.step, batch)
        with setup.precision.context(setup.device), model.scheduled(given):
            if not model.is_last:
                return model.hidden(batch, **setup.kernels)
            sums = setup.objective.sums(model, batch, setup.kernels, setup.loss)
        of_pass = {name: value / self.units for name, value in sums.items()}
        add(self.means, {name: value.detach() for name, value in of_pass.items()})
        if batch.padding_tokens < len(batch.tokens):
            self.terms[batch.place] = of_pass["loss"].detach()
        return self.scaler.scale(of_pass["loss"])


def _timed(run: Callable[..., T], lap: Lap, part: str) -> Callable[..., T]:
    """Return `run` with its time counted as this part, and the time since the last lap as waiting for another stage."""
    def timed(*args: Any, **kwargs: Any) -> T:
        lap(COMMUNICATION)
        result = run(*args, **kwargs)
        lap(part)
        return result

    return timed
