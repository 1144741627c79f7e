"""What every technique answers: what it does, when it applies, what it changes, and how we know.

A technique file has two halves. The planning half (`propose`, `reckon`, `variants`) is arithmetic on facts and loads no torch.
The applying half (`apply`, `confirm`) changes a `Setup` and imports inside its functions what it needs of torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from powertrain.cost.estimate import estimate
from powertrain.cost.fitting import PLANNED_SHARE, in_passes_of_one, longest_example, planned_room_bytes, total_bytes
from powertrain.cost.precision import unit_of
from powertrain.cost.weights import eight_bit_saving, why_not_eight_bit
from powertrain.cost.workload import Workload
from powertrain.models.kernels import build
from powertrain.records import Effect, Facts, ModelFacts, NotApplied, Proposal, Refusal, UnknownFact, Why
from powertrain.records.sizes import digits, memory
from powertrain.training.optimizers import OPTIMIZERS, Row

if TYPE_CHECKING:
    from powertrain.models.kernels.frozen import Coarse
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup as Setup
else:
    Setup = Any                              # only annotations name it: its file loads torch, which planning does without

# the classes of work that a step's time is divided into (evidence/profile.py measures them)
EVERYTHING = frozenset({"products", "attention", "loss", "elementwise", "optimizer", "data", "copy"})
GIB = 2**30
PASSES_A_STAGE = 4           # of a pipeline: then a process waits for less than a fifth of the step
WORTH_IT = 2                 # times its own cost that compiling has to save
TOO_LARGE = "divides a model among them that is too large for one"       # what several processes are good for
NOTHING: Mapping[str, Any] = {}
LARGEST = 2**31 - 1          # whole-number setting


class Exactness(enum.Enum):
    """How far results may move; it sets the proof that a technique owes."""

    BITWISE = "same bits"
    ROUNDING = "same mathematics, other rounding"
    LOSSY = "other mathematics"


def name_of(part: object) -> str:
    """Return the name of a part of a setup, a function or an object, for the sentence that says what is in force."""
    if isinstance(part, partial):
        return name_of(part.func)
    return str(getattr(part, "__qualname__", type(part).__qualname__))


class CannotBuild(NotApplied):
    """Code that the technique needs could not be compiled here; `instead` needs none. None: nothing takes its place."""

    def __init__(self, message: str, instead: Technique | None):
        super().__init__(message)
        self.instead = instead


@dataclass(frozen=True)
class Need:
    """The memory that a step needs at its peak, beside the memory that a plan may count on."""

    needed_bytes: int
    room_bytes: int

    @property
    def is_met(self) -> bool:
        return self.needed_bytes <= self.room_bytes

    @property
    def numbers(self) -> Mapping[str, float]:
        return {"needed_bytes": self.needed_bytes, "room_bytes": self.room_bytes}

    def __str__(self) -> str:
        needed, room = memory(self.needed_bytes), memory(self.room_bytes)
        text = f"{needed} of the {room} that a plan may use" if self.is_met else f"{needed}, and a plan may use {room}"
        return f"{text} ({PLANNED_SHARE:.0%} of what is free)"


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Facts):
    """A run as a technique is asked about it: the facts, the recipe, and what the techniques asked before have decided.

    `decided` is the optimizer step's arithmetic as decided so far: dtype of the products, packing, micro-batch, attention
    kernel, fused blocks and so on. A technique decides through `decides` or `reckon`.
    """

    recipe: Recipe
    decided: Workload

    @classmethod
    def of(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Self:
        return cls(**{each.name: getattr(facts, each.name) for each in fields(Facts)}, recipe=recipe, decided=decided)

    def one_example(self, **changes: Any) -> Workload:
        """Return the step as it is decided so far, but in passes of one example each, the longest there is."""
        return replace(in_passes_of_one(self.decided, longest_example(self.data)), **changes)

    @property
    def least_passes(self) -> int:
        """Return the passes that a step should have: one for each process that shares them, or several for each stage.

        Processes that divide the matrices of each block compute every pass together.
        """
        each = PASSES_A_STAGE if self.decided.stages > 1 else 1
        return min(self.data.train_batch_size, each * self.hardware.processes // self.decided.tensor_degree)

    def need(self, workload: Workload, model: ModelFacts | None = None) -> Need:
        """Return what a step of this workload needs, beside the room that there is."""
        return Need(total_bytes(model or self.model, workload), planned_room_bytes(self.hardware))

    def bargain(self, gain: tuple[float, float], compile_s: float) -> tuple[bool, str]:
        """Return whether compiling pays in a run as long as the recipe wants it, and a clause with the numbers.

        `gain`: the step's time with compiled code over that without, low and high; the middle is expected.
        """
        step_s = self._plain_step_s()
        if step_s is None:
            return False, "the speed of this machine is not measured, so the gain from compiling is unknown"
        seconds = self.recipe.train_time_s
        steps = self.recipe.steps(self.data.examples) if seconds is None else max(1, round(seconds / step_s))
        saved_s = steps * step_s * (1 - sum(gain) / 2)
        cost = (f"compiling takes about {compile_s:.0f} s and would save about {digits(saved_s)} s of the "
                f"{digits(steps * step_s)} s that the steps take without it")
        if saved_s < WORTH_IT * compile_s:
            return False, f"{cost}; compiling is used only if it saves {WORTH_IT} times its own time"
        return True, f"{cost}, so it pays after step {max(1, compile_s / saved_s * steps):,.0f} of {steps:,}"

    def _plain_step_s(self) -> float | None:
        """Return the seconds of a step without compiling, or None if this machine's speed is not measured."""
        try:
            plain = replace(self.decided, compiled=False, fused_blocks=False)
            return sum(estimate(self.model, plain, self.hardware, 1).step_s) / 2
        except UnknownFact:
            return None


class Technique:
    """One way to train faster or smaller. A subclass is a frozen dataclass; its fields are its settings."""

    name: ClassVar[str]
    does: ClassVar[str]                      # what it does, in a few words that begin with a verb
    exactness: ClassVar[Exactness]
    touches: ClassVar[frozenset[str]]        # the fields of Setup that apply() may change
    acts_on: ClassVar[frozenset[str]] = EVERYTHING       # the work whose time it can change: bounds what it can gain
    slots: ClassVar[frozenset[str]] = frozenset()        # of techniques that share a slot at most one is in force
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}        # of a setting: the values that it may have
    may_be_zero: ClassVar[frozenset[str]] = frozenset()  # of the whole-number settings; the others are 1 or more
    most: ClassVar[Mapping[str, int]] = NOTHING          # of the whole-number settings; of the others LARGEST
    native_only: ClassVar[bool] = False      # it changes the inside of the built-in decoder
    needs_whole_weights: ClassVar[bool] = False          # it cannot be where processes divide each weight among them
    needs_all_trained: ClassVar[bool] = False            # it cannot be where the recipe freezes some weights, but for a base
    for_several: ClassVar[str] = ""          # what several processes are good for, of a technique that needs them
    asked_first: ClassVar[bool] = False      # others depend on its decision, though it is applied after them
    decides: ClassVar[Mapping[str, Any]] = NOTHING       # fields of the workload -> the value that it gives them
    decides_by: ClassVar[Mapping[str, str]] = NOTHING    # fields of the workload -> the setting whose value they take
    source: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that cannot have its value."""
        for setting, value in vars(self).items():
            key, least = f"techniques.{self.name}.{setting}", 0 if setting in self.may_be_zero else 1
            if value not in self.choices.get(setting, (value,)):
                raise ValueError(f"{key}={value!r} is none of {', '.join(self.choices[setting])}")
            if type(value) is int and value < least:
                raise ValueError(f"{key} is {value}; use {least} or more")
            if type(value) is int and value > (most := self.most.get(setting, LARGEST)):
                raise ValueError(f"{key} is more than {most:,}; use {most} or less")

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        """Answer yes, with settings and a claim, or no; either way with the reason. Nothing is built, loaded or fetched."""
        raise NotImplementedError

    @classmethod
    def answer(cls, run: PlannedRun) -> Proposal | Refusal:
        """Return what the technique proposes, or a refusal where another library computes what it would change."""
        if cls.native_only and run.model.provider != "native":
            return cls.refuse(Why.OTHER_PROVIDER, f"{run.model.provider} computes this model, and the technique changes only "
                                                  "the built-in decoder")
        parts = {"sharding": run.decided.shards, "tensor_parallel": run.decided.tensor_degree}
        rival = next((name for name, count in parts.items() if count > 1), None)
        if cls.needs_whole_weights and rival is not None:
            return cls.refuse(Why.CONFLICT, f"{rival} leaves a process 1 / {parts[rival]} of each divided weight, and the "
                                            "technique works on whole ones", rival=rival)
        if cls.needs_all_trained and run.model.frozen:
            return cls.refuse(Why.DOES_NOT_APPLY, f"weights.freeze leaves {len(run.model.frozen):,} weights as they are, and "
                                                  "the technique is built for models that train all weights, or adapters")
        if cls.needs_whole_weights and run.decided.stages > 1:
            return cls.refuse(Why.CONFLICT, "pipeline_parallel leaves a process some blocks, with several passes in them at "
                                            "once, and the technique is built for whole models", rival="pipeline_parallel")
        if cls.for_several and run.hardware.processes == 1:
            return cls.refuse(Why.DOES_NOT_APPLY, "the run has one process; on several GPUs --processes N (in a plan for "
                                                  f"others --machine 8xKIND) {cls.for_several}", cure=("--processes 2",))
        return cls.propose(run)

    def unmet(self, run: PlannedRun) -> Refusal | None:
        """Return what is missing in the finished plan for a technique that was asked first; None where nothing is."""
        return None

    def compiles(self) -> bool:
        """Return whether it needs code that is compiled here, once on a machine or in each run."""
        return False

    def build(self) -> None:
        """Compile the code that the technique needs beforehand, as a run starts. Raises CannotBuild."""

    def build_kernels(self, sources: Iterable[Path], what: str, otherwise: str, instead: Technique | None) -> None:
        """Compile `what`, our own kernels, unless that was done before. Raises CannotBuild with what to do `otherwise`."""
        try:
            for source in sources:
                build.load(source)
        except build.CannotBuild as error:
            raise CannotBuild(f"{self.name}: {what} could not be compiled: {error}; {otherwise}", instead) from None

    @classmethod
    def pinned_setting(cls, run: PlannedRun, setting: str) -> Any:
        """Return the value that the recipe asks for, or None."""
        pin = run.recipe.techniques.get(cls.name)
        return pin.get(setting) if isinstance(pin, Mapping) else None

    def apply(self, setup: Setup) -> Setup:
        """Return a changed copy of `setup`; the caller's copy stays as it was."""
        raise NotImplementedError

    def confirm(self, setup: Setup) -> None:
        """Raise NotApplied unless the technique is in force in `setup`."""
        raise NotImplementedError

    def found(self, setup: Setup) -> str | None:
        """Return what the technique met in this model as it was put in force; None where there is nothing to say."""
        return None

    def reckon(self, workload: Workload) -> Workload:
        """Return the step's arithmetic with this technique in force."""
        settings = {field: getattr(self, setting) for field, setting in self.decides_by.items()}
        return replace(workload, **self.decides, **settings)

    def halved(self) -> Self | None:
        """Return the technique with half as much in each forward pass; None where it sets no size, or cannot halve it."""
        return None

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        """Return the settings worth measuring here, None being without the technique; not all may fit the memory."""
        answer = cls.answer(run)
        found = cls.settings_of(answer)
        if found is None:
            return ()
        return (found, None) if isinstance(answer, Proposal) else (found,)

    @classmethod
    def if_compiling_pays(cls, run: PlannedRun, claim: Effect, compile_s: float, needs: Iterable[str], *,
                          settings: Self | None = None, also: str = "") -> Proposal | Refusal:
        """Return yes if what compiling `needs` is here, and it saves more time than it takes. `also`: a further fact."""
        if (missing := cls.without_parts(run, needs)) is not None:
            return missing
        (pays, shown), numbers = run.bargain(claim.step_time, compile_s), {"compile_s": compile_s}
        if not pays:
            return cls.refuse(Why.WOULD_NOT_PAY, shown, settings or cls(), numbers=numbers)
        return (settings or cls()).on(shown + also, claim, numbers)

    @classmethod
    def settings_of(cls, answer: Proposal | Refusal) -> Self | None:
        """Return the technique of an answer, or the possible one of a refusal, or None."""
        found = answer.technique if isinstance(answer, Proposal) else answer.possible
        assert found is None or isinstance(found, cls)
        return found

    def on(self, because: str, claim: Effect, numbers: Mapping[str, float] = NOTHING) -> Proposal:
        return Proposal(self, because, claim, numbers)

    @classmethod
    def refuse(cls, why: Why, because: str, possible: Self | None = None, *, part: str = "", rival: str = "",
               cure: tuple[str, ...] = (), numbers: Mapping[str, float] = NOTHING) -> Refusal:
        """Return a no. With `possible`, a pin in the recipe turns the technique on all the same."""
        if possible is not None:
            cure = (f"techniques.{cls.name}=on", *cure)
        return Refusal(cls.name, because, possible, why, numbers, part, rival, cure, cls.does)

    @classmethod
    def without_parts(cls, facts: Facts, parts: Iterable[str]) -> Refusal | None:
        """Return the refusal for the first of `parts` that is not usable on this machine; None where all are."""
        missing = next((part for part in parts if part in facts.software.missing), None)
        if missing is None:
            return None
        return cls.refuse(Why.PART_MISSING, f"{missing}: {facts.software.missing[missing]}", part=missing)


class InEightBits(Technique):
    """A technique that stores and multiplies the frozen matrices in 8 bits. This changes the result: only a pin turns it on."""

    stored: ClassVar[str]                    # "int8" or "fp8"
    units: ClassVar[str]                     # the hardware that multiplies such numbers fast
    of_amd: ClassVar[str]                    # why not on an AMD GPU
    rounded: ClassVar[str]                   # what is rounded, in words

    native_only = True
    exactness = Exactness.LOSSY
    decides_by: ClassVar = {"base_dtype": "stored"}
    touches = frozenset({"runtime"})
    acts_on = frozenset({"products", "elementwise"})
    slots = frozenset({"base"})

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        model, hardware = run.model, run.hardware
        if (reason := why_not_eight_bit(model)) is not None:
            return cls.refuse(Why.DOES_NOT_APPLY, reason)
        if (unit := unit_of(hardware, cls.stored)) is None:
            why = cls.of_amd if hardware.architecture else f"{hardware.name} has no {cls.units}"
            return cls.refuse(Why.HARDWARE_LACKS, why)
        weights, saved_bytes = eight_bit_saving(model, cls.stored, hardware.device)
        return cls.refuse(Why.CHANGES_RESULT, f"{weights:,} frozen weights would take {saved_bytes / 2**20:,.0f} MiB less "
                          f"({unit}), but {cls.rounded} change the result slightly, so this is used only if you ask: "
                          f"techniques.{cls.name}=on", cls(), numbers={"saved_bytes": saved_bytes})

    def apply(self, setup: Setup) -> Setup:
        from powertrain.models.kernels import frozen

        dtype, try_out = getattr(frozen, self.stored.upper()), partial(setup.try_out, frozen.TRIED_TOKENS)
        scale = partial(frozen.scale_base, setup.model, dtype, try_out, otherwise=setup.precision.compute_dtype)
        return replace(setup, runtime=(*setup.runtime, scale))

    def confirm(self, setup: Setup) -> None:
        if not (found := self._coarse(setup)).scaled:
            raise NotApplied(f"{self.name}: no frozen matrix of the model is in {self.stored} ({found})")

    def found(self, setup: Setup) -> str:
        return f"{self.name}: {self._coarse(setup)}"

    def _coarse(self, setup: Setup) -> Coarse:
        from powertrain.models.kernels import frozen

        return frozen.Coarse.of(setup.model, getattr(frozen, self.stored.upper()))


class HalfPrecision(Technique):
    """A technique that multiplies matrices in a type of 16 bits, under autocast. Trained weights stay fp32."""

    torch_dtype: ClassVar[str]               # by torch's name
    scales_loss: ClassVar[bool] = False      # so that small gradients do not vanish

    exactness = Exactness.ROUNDING
    touches = frozenset({"precision"})
    slots = frozenset({"precision"})

    def apply(self, setup: Setup) -> Setup:
        import torch

        from powertrain.training.setup import Precision

        return replace(setup, precision=Precision(getattr(torch, self.torch_dtype), loss_scaling=self.scales_loss))

    def confirm(self, setup: Setup) -> None:
        import torch

        if (found := setup.product_dtype()) is not getattr(torch, self.torch_dtype):
            raise NotApplied(f"{self.name}: matrix products are computed in {found}")
        master = {parameter.dtype for parameter in setup.model.parameters() if parameter.requires_grad}
        if master != {torch.float32}:
            raise NotApplied(f"{self.name}: the weights that are trained are {', '.join(sorted(map(str, master)))}, not all "
                             "fp32")
        if self.scales_loss and not setup.precision.loss_scaling:
            raise NotApplied(f"{self.name}: the loss is not scaled, so small gradients vanish")


class OptimizerForm(Technique):
    """A technique that keeps the state of the recipe's optimizer in another form, which is another row of the table."""

    form: ClassVar[str]                      # the field of the optimizer's row that names the other row

    touches = frozenset({"optimizer"})
    acts_on = frozenset({"optimizer"})
    slots = frozenset({"optimizer", "moments"})

    @classmethod
    def row_for(cls, optimizer: str) -> Row | None:
        """Return the row of the other form; None if this optimizer has no such form."""
        name = getattr(OPTIMIZERS.named(optimizer), cls.form)
        return None if name is None else OPTIMIZERS.named(name)

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, optimizer=setup.optimizer.as_row(getattr(setup.optimizer.row, self.form)))

    def reckon(self, workload: Workload) -> Workload:
        row = self.row_for(workload.optimizer.name)
        assert row is not None
        return replace(workload, optimizer=row.facts_on(workload.device, average_bytes=workload.optimizer.average_bytes))
