"""What every technique answers: when, what for, how, and how we know."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from powertrain.records import Facts, Proposal, Refusal

if TYPE_CHECKING:
    from powertrain.cost.workload import Workload
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup


# the classes of work that a step's time is divided into (evidence/profile.py measures them)
EVERYTHING = frozenset({"products", "attention", "loss", "elementwise", "optimizer", "data", "copy"})


class Exactness(enum.Enum):
    """How far results may move; it sets the proof that a technique owes."""

    BITWISE = "same bits"
    ROUNDING = "same mathematics, other rounding"
    LOSSY = "other mathematics"


class NotApplied(Exception):
    """A technique was asked for and is not in force."""


class Technique:
    """One way to train faster or smaller. A subclass is a frozen dataclass; its fields are its settings."""

    name: ClassVar[str]
    does: ClassVar[str]                      # what it does, as "multiplies matrices in bfloat16": read before the reason
    exactness: ClassVar[Exactness]
    touches: ClassVar[frozenset[str]]        # the fields of Setup that apply() may change
    acts_on: ClassVar[frozenset[str]] = EVERYTHING       # the work whose time it can change: bounds what it can gain
    slot: ClassVar[str | None] = None        # at most one technique per slot
    source: ClassVar[str]

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        """Say yes, with settings and a claim, or no; either way with the reason."""
        raise NotImplementedError

    def apply(self, setup: Setup) -> Setup:
        """Return a changed copy of `setup`; the caller's copy stays as it was."""
        raise NotImplementedError

    def confirm(self, setup: Setup) -> None:
        """Raise NotApplied unless the technique is in force in `setup`."""
        raise NotImplementedError

    def found(self, setup: Setup) -> str | None:
        """What it met in this model as it was put in force, for whoever watches the run; None: nothing to say."""
        return None

    def reckon(self, workload: Workload) -> Workload:
        """The step's arithmetic with this technique in force; unchanged where it changes neither work nor memory."""
        return workload

    def halved(self) -> Self | None:
        """The technique with half as much in each forward pass; None where it does not decide that, or cannot halve it."""
        return None

    @classmethod
    def variants(cls, facts: Facts, recipe: Recipe) -> Sequence[Technique | None]:
        """The ways in which it can be here, None being without it, for measuring to choose from; not all may fit the memory."""
        answer = cls.propose(facts, recipe)
        if isinstance(answer, Proposal):
            return answer.technique, None
        return () if answer.possible is None else (answer.possible,)

    @classmethod
    def refuse(cls, because: str, possible: Self | None = None) -> Refusal:
        """No. With `possible`, what a pin in the recipe would turn on all the same."""
        return Refusal(cls.name, because, possible)
