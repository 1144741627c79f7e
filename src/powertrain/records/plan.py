"""The plan's records: what each technique answered and why, what is expected of the run, and the errors of a recipe's pins.

A sentence (`because`) is for people. What code must know stands in typed fields beside it.
"""

import dataclasses
import difflib
import enum
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from powertrain.records.errors import WrongUse


class Planned(Protocol):
    """A technique with its settings, as a plan holds it. techniques/base.py says what each member means."""

    @property
    def name(self) -> str: ...
    @property
    def does(self) -> str: ...
    @property
    def exactness(self) -> enum.Enum: ...
    @property
    def touches(self) -> frozenset[str]: ...
    @property
    def acts_on(self) -> frozenset[str]: ...
    @property
    def slots(self) -> frozenset[str]: ...
    def compiles(self) -> bool: ...
    def build(self) -> None: ...
    def apply(self, setup: Any, /) -> Any: ...
    def confirm(self, setup: Any, /) -> None: ...
    def found(self, setup: Any, /) -> str | None: ...
    def reckon(self, workload: Any, /) -> Any: ...
    def halved(self) -> Self | None: ...


class Why(enum.StrEnum):
    """Why a technique is off."""

    OFF_IN_RECIPE = "off_in_recipe"
    TUNED_OFF = "tuned_off"                  # a measurement found the run faster without
    OTHER_PROVIDER = "other_provider"        # another library computes the model
    PART_MISSING = "part_missing"            # software that is not installed or not usable
    HARDWARE_LACKS = "hardware_lacks"
    DOES_NOT_APPLY = "does_not_apply"        # model, data or method give it nothing to do
    NOT_NEEDED = "not_needed"                # what it would save is there, or another technique does it
    WOULD_NOT_PAY = "would_not_pay"
    NOT_MEASURED = "not_measured"            # no study has shown a gain yet
    NOT_BUILT = "not_built"                  # in Powertrain
    CHANGES_RESULT = "changes_result"        # other mathematics: only if the recipe asks for it
    NO_ROOM = "no_room"                      # in the memory
    CONFLICT = "conflict"                    # with what another technique has decided
    SLOT_TAKEN = "slot_taken"                # by a technique of the same kind
    UNKNOWN = "unknown"                      # in plans that were written before reasons had a kind


@dataclass(frozen=True)
class Effect:
    """What a technique changes, against the same plan without it."""

    step_time: tuple[float, float]           # ratio, low..high: (0.7, 0.8) = the step takes 70-80 % of the time
    peak_memory_bytes: int                   # change; negative saves
    basis: str                               # "formula: ...", "study: <folder in studies/>" or "guess: ..."
    guessed: bool = False                    # neither a formula nor a study gives the step time


def is_guess(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim of plan.json is a guess. Plans from before `guessed` say so in the basis alone."""
    return bool(claim.get("guessed", claim["basis"].startswith("guess:")))


@dataclass(frozen=True)
class Refusal:
    """A technique stays off. With `possible` it could run here: a pin in the recipe turns it on."""

    technique: str
    because: str
    possible: Planned | None = None
    why: Why = Why.UNKNOWN
    numbers: Mapping[str, float] = field(default_factory=dict)   # that the reason rests on, with their unit in the name
    part: str = ""                           # the software that is missing
    rival: str = ""                          # the technique that stands in the way
    cure: tuple[str, ...] = ()               # recipe words that turn it on; () where none do
    does: str = ""                           # what the technique does


@dataclass(frozen=True)
class Proposal:
    """A technique is on, with its settings chosen from the facts, or as the recipe pins them."""

    technique: Planned
    because: str                             # the facts that speak for it, with their numbers
    claim: Effect
    numbers: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False                     # the recipe asks for it, or sets it
    against: Refusal | None = None           # what the planner would have answered without the pin


@dataclass(frozen=True)
class Estimate:
    """What the plan expects of a run, before any step. FLOPs, bytes and peak are those of all processes of the run."""

    step_s: tuple[float, float]              # low, high
    floor_s: float                           # compute or memory traffic alone, at the measured peaks
    bound_by: str                            # "compute" or "memory bandwidth": the wall the floor stands at
    flops_per_step: float
    flops_per_token: float
    dtype: str                               # of the matrix products: "fp32", "bf16", ...
    peak_flops_per_s: float                  # measured limit that shares are quoted against
    tokens_per_step: int
    steps: int
    memory_bytes: Mapping[str, int]          # component -> bytes at the peak: weights, gradients, optimizer, ...
    basis: str
    copied_bytes: int = 0                    # of host memory, besides: the copy of a checkpoint while it is written, if free
    padding_share: float = 0.0               # of the slots that are computed
    largest_pass: Mapping[str, int] = field(default_factory=dict)  # that fits: examples, tokens, bytes at the peak
    bytes_per_step: float | None = None      # that the floor counts: products' operands and the optimizer's state
    step_basis: str = ""                     # of `step_s` alone: "3 runs on this machine"
    peak_basis: str = "measured"             # of the peaks: "measured", or "published" for a machine that is not here
    efficiency: tuple[float, float] | None = None    # of several processes: a step's time on one, over all of theirs; low, high
    held_back_by: str = ""                   # what takes most of a shared step: see cost/sharing.py
    exchanges: str = ""                      # of a shared step, counted: "2 all-reduces, 33 MiB"

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        low_s, high_s = self.step_s
        return self.tokens_per_step / high_s, self.tokens_per_step / low_s

    @property
    def leaves_out_exchanges(self) -> bool:
        """Return whether `step_s` has no time for what the processes exchange, because their links are not known."""
        return bool(self.exchanges) and self.efficiency is None

    @property
    def total_memory_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class Plan:
    steps: tuple[Proposal, ...]
    refused: tuple[Refusal, ...]
    estimate: Estimate | None = None         # None where a fact it needs is unknown

    @property
    def names(self) -> tuple[str, ...]:
        """Return the techniques in force, in order."""
        return tuple(step.technique.name for step in self.steps)

    def without(self, name: str) -> Self:
        """Return the same plan less one technique: the other arm of its ablation."""
        kept = tuple(step for step in self.steps if step.technique.name != name)
        if len(kept) == len(self.steps):
            raise KeyError(f"no {name!r} in this plan; it has {list(self.names)}")
        return dataclasses.replace(self, steps=kept, estimate=None)


# ------------------------------------------------------------------------------------------------ errors of pins


class PinError(WrongUse):
    """The recipe's `techniques` cannot be as they are written; `technique` is the one to change."""

    def __init__(self, message: str, technique: str, setting: str = "", *, cure: tuple[str, ...] = ()):
        super().__init__(message, keys=(".".join(filter(None, ("techniques", technique, setting))),), cure=cure)
        self.technique = technique


class UnknownTechnique(PinError):
    """No technique has this name; `near` is the one that may be meant."""

    def __init__(self, technique: str, near: str, known: tuple[str, ...]):
        hint = f"; did you mean {near}?" if near else ""
        super().__init__(f"there is no technique {technique!r}{hint} (known: {', '.join(known)})", technique)
        self.near = near


class WrongSetting(PinError):
    """A pinned technique has no such setting, or the setting cannot have this value."""


class PinRefused(PinError):
    """The recipe turns a technique on that cannot run here; `refusal` says why."""

    def __init__(self, refusal: Refusal):
        name = refusal.technique
        super().__init__(f"techniques.{name} is pinned on and cannot be used here: {refusal.because}; remove the pin, or set "
                         f"techniques.{name}=off", name, cure=(f"techniques.{name}=off",))
        self.refusal = refusal


class PinsClash(PinError):
    """The recipe turns two techniques on of which only one can be in force."""

    def __init__(self, technique: str, rival: str):
        super().__init__(f"techniques.{technique} and techniques.{rival} are both pinned on, and only one of them can be in "
                         "force; remove one of the two pins", technique,
                         cure=(f"techniques.{technique}=off",))
        self.rival = rival


def near(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like another; "" where none is."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)), "")


def check_settings(technique: Any, settings: Mapping[str, Any]) -> None:
    """Raise WrongSetting where a technique's class has no such setting, or one of another type."""
    types, known = typing.get_type_hints(technique), [field.name for field in dataclasses.fields(technique)]
    for name, value in settings.items():
        if name not in known:
            hint = f"; did you mean {meant}?" if (meant := near(name, known)) else ""
            have = f"its settings are {', '.join(known)}" if known else "it has no settings, only on and off"
            raise WrongSetting(f"techniques.{technique.name} has no setting {name!r}{hint} ({have})", technique.name, name)
        if type(value) is not types[name]:
            raise WrongSetting(f"techniques.{technique.name}.{name}={value!r} should be of type {types[name].__name__}",
                               technique.name, name)


def with_settings(technique: Any, settings: Mapping[str, Any]) -> Any:
    """Return the technique with these settings. Raises WrongSetting."""
    check_settings(type(technique), settings)
    try:
        return dataclasses.replace(technique, **settings)
    except ValueError as error:
        raise WrongSetting(str(error), technique.name) from None
