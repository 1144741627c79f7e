"""What all events share: the class of one, of a warning, and of one that this version does not know."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform


def _now() -> float:
    return round(time.time(), 3)


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run. Every subclass is such a dataclass too."""

    kind: ClassVar[str] = ""
    time: float = field(default_factory=_now)            # of the day, in seconds since 1970
    step: int = 0                                        # optimizer steps that were done
    more: Mapping[str, Any] = field(default_factory=dict)    # fields of a later version

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Unknown(Event):
    """An event of a kind that this version does not know."""

    event: str


class Told(Event):
    """A warning or a note: something that is also shown to people, as a sentence made from its fields."""

    about: ClassVar[str] = ""
    says: ClassVar[str] = ""                 # the sentence, with names of fields in it
    message: str = ""                        # the sentence itself, where it was not made from fields

    @property
    def sentence(self) -> str:
        """Return the warning or note for people."""
        unknown = f"a {self.kind} that this version of powertrain does not know: {dict(self.more)}"
        return self.message or self.says.format_map(vars(self)) or unknown


class RunWarning(Told):
    """A warning. This class itself is one of version 1 that no kind below covers, or one of a later version."""

    kind = "warning"


class Note(Told):
    """Something worth knowing that asks for nothing."""

    kind = "note"
