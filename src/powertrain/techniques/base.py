"""What every technique answers: what it does, when it applies, what it changes, and how we know.

A technique file has two halves. The planning half (`propose`, `reckon`, `variants`) is arithmetic on facts and loads no torch.
The applying half (`apply`, `confirm`) changes a `Setup` and imports inside its functions what it needs of torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from powertrain.records import Effect, Facts, NotApplied, Proposal, Refusal
from powertrain.records.plan import Why

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


# the classes of work that a step's time is divided into (evidence/profile.py measures them)
T = TypeVar("T")
EVERYTHING = frozenset({"products", "attention", "loss", "elementwise", "optimizer", "data", "copy"})
GIB = 2**30
NONE: Mapping[str, float] = {}


class Exactness(enum.Enum):
    """How far results may move; it sets the proof that a technique owes."""

    BITWISE = "same bits"
    ROUNDING = "same mathematics, other rounding"
    LOSSY = "other mathematics"


class CannotBuild(NotApplied):
    """Code that the technique needs could not be compiled here; `instead` needs none."""

    def __init__(self, message: str, instead: Technique):
        super().__init__(message)
        self.instead = instead


class Technique:
    """One way to train faster or smaller. A subclass is a frozen dataclass; its fields are its settings.

    `decided` is the optimizer step's arithmetic with everything that the techniques asked before have decided: dtype of the
    products, packing, micro-batch, attention kernel, fused blocks and so on. A technique decides through `reckon`.
    """

    name: ClassVar[str]
    does: ClassVar[str]                      # what it does, in a few words that begin with a verb
    exactness: ClassVar[Exactness]
    touches: ClassVar[frozenset[str]]        # the fields of Setup that apply() may change
    acts_on: ClassVar[frozenset[str]] = EVERYTHING       # the work whose time it can change: bounds what it can gain
    slots: ClassVar[frozenset[str]] = frozenset()        # of techniques that share a slot at most one is in force
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}        # of a setting: the values that it may have
    may_be_zero: ClassVar[frozenset[str]] = frozenset()  # of the whole-number settings; the others are 1 or more
    native_only: ClassVar[bool] = False      # it changes the inside of the built-in decoder
    asked_first: ClassVar[bool] = False      # others depend on its decision, though it is applied after them
    source: ClassVar[str]

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that cannot have its value."""
        for setting, value in vars(self).items():
            key, least = f"techniques.{self.name}.{setting}", 0 if setting in self.may_be_zero else 1
            if value not in self.choices.get(setting, (value,)):
                raise ValueError(f"{key}={value!r} is none of {', '.join(self.choices[setting])}")
            if type(value) is int and value < least:
                raise ValueError(f"{key} is {value}; use {least} or more")

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Proposal | Refusal:
        """Answer yes, with settings and a claim, or no; either way with the reason. Nothing is built, loaded or fetched."""
        raise NotImplementedError

    @classmethod
    def answer(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Proposal | Refusal:
        """Return what the technique proposes, or a refusal where another library computes what it would change."""
        if cls.native_only and facts.model.provider != "native":
            return cls.refuse(Why.OTHER_PROVIDER, f"{facts.model.provider} computes this model, and the technique changes only "
                                                  "the built-in decoder")
        return cls.propose(facts, recipe, decided)

    def unmet(self, facts: Facts, decided: Workload) -> Refusal | None:
        """Return what is missing in the finished plan for a technique that was asked first; None where nothing is."""
        return None

    def build(self) -> None:
        """Compile the code that the technique needs beforehand, as a run starts. Raises CannotBuild."""

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
        """Return the step's arithmetic with this technique in force; unchanged where it changes neither work nor memory."""
        return workload

    def halved(self) -> Self | None:
        """Return the technique with half as much in each forward pass; None where it sets no size, or cannot halve it."""
        return None

    @classmethod
    def variants(cls, facts: Facts, recipe: Recipe, decided: Workload) -> Sequence[Technique | None]:
        """Return the settings worth measuring here, None being without the technique; not all may fit the memory."""
        answer = cls.answer(facts, recipe, decided)
        if isinstance(answer, Proposal):
            return cls.settings_of(answer), None
        return () if answer.possible is None else (cls.settings_of(answer),)

    @classmethod
    def settings_of(cls, answer: Proposal | Refusal) -> Self:
        """Return the technique of an answer, or the possible one of a refusal."""
        found = answer.technique if isinstance(answer, Proposal) else answer.possible
        assert isinstance(found, cls)
        return found

    def on(self, because: str, claim: Effect, numbers: Mapping[str, float] = NONE) -> Proposal:
        return Proposal(self, because, claim, numbers)

    @classmethod
    def refuse(cls, why: Why, because: str, possible: Self | None = None, *, part: str = "", rival: str = "",
               cure: tuple[str, ...] = (), numbers: Mapping[str, float] = NONE) -> Refusal:
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


def of_free(needed_bytes: int, room_bytes: int) -> str:
    """Say how much memory is needed, beside how much is free."""
    needed, free = f"{needed_bytes / GIB:.2f} GiB", f"{room_bytes / GIB:.1f} GiB"
    return f"{needed} of the {free} free" if needed_bytes <= room_bytes else f"{needed}, and {free} are free"


def find_runner(run_block: Any, kind: type[T]) -> T | None:
    """Return the runner of blocks of this kind among those that are wrapped around each other."""
    while not isinstance(run_block, kind) and hasattr(run_block, "inner"):
        run_block = run_block.inner
    return run_block if isinstance(run_block, kind) else None
