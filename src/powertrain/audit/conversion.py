"""What became of a subject's keys in a recipe: typed values, from which texts are made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from powertrain.audit.subject import Setting, Subject

Fate = Literal["translated", "planned", "no effect", "not supported", "unknown", "unread", "default"]
FATES: tuple[Fate, ...] = ("translated", "default", "planned", "no effect", "not supported", "unknown", "unread")
NO_MODEL, NO_DATA = "NAME-THE-MODEL", "NAME-THE-DATA"       # neither exists, so a run says so before it does anything


@dataclass(frozen=True)
class Accounted:
    """What became of one key."""

    key: str                                 # in the audit's names; of `unknown` keys the file's own
    setting: Setting | None                  # None: a default of the trainer, which the file does not say
    fate: Fate
    why: str = ""
    ours: Mapping[str, Any] = field(default_factory=dict)        # dotted keys of the recipe
    pins: Mapping[str, Any] = field(default_factory=dict)        # that would keep it, of what is left to the plan


@dataclass(frozen=True)
class Missing:
    """What a run needs and the file does not say, or names something that is not here."""

    what: Literal["model", "data", "learning rate"]
    says: str                                # with the cure


@dataclass(frozen=True)
class Conversion:
    subject: Subject
    accounts: tuple[Accounted, ...]
    lacks: tuple[Missing, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(one.says for one in self.lacks)

    @property
    def values(self) -> dict[str, Any]:
        """Return the recipe: dotted key -> value."""
        return {key: value for account in self.accounts for key, value in account.ours.items()}

    @property
    def pins(self) -> dict[str, Any]:
        """Return the pins that would keep what is left to the plan as the original has it."""
        return {key: value for account in self.accounts for key, value in account.pins.items()}
