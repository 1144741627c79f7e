"""What a tracker is told, and what it has to do: the contract of the files beside this one, one for each tracker.

A run gives the same rows whoever follows it, and when: a row is a point of curves or a sample, numbered from 0 in the order of
events.jsonl. A tracker says how many rows it holds already, and gets the rest. What a library does not hold exactly once by
itself, its file has to see to: a process may be killed after a row was sent and before that was written down.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "tracking"                          # of a run: what its trackers have written, and how far they are
PROJECT = "powertrain"                       # where neither the recipe nor the tracker's own settings name one


@dataclass(frozen=True)
class Followed:
    """A run, or a study, as a tracker is told of it."""

    path: Path
    id: str                                  # made from its first event, so that everybody who follows it has the same one
    kind: str = "run"                        # or "study"
    project: str | None = None               # of the recipe
    settings: Mapping[str, Any] = field(default_factory=dict)    # the recipe's values by dotted key

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def folder(self) -> Path:
        """Return the folder for what trackers write here."""
        return self.path / FOLDER


@dataclass(frozen=True)
class Row:
    """Values of curves at a step, or the text of a sample."""

    number: int
    step: int
    time: float                              # of the day, in seconds since 1970
    values: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Artefact:
    """A file of the run: its kind is "recipe", "plan", "facts" or "study"."""

    kind: str
    name: str
    text: str


class Tracker(ABC):
    """One tracker, open for one run. Every method may raise whatever its library raises; it is then opened again.

    `kept` and `rows` are what the last process noted after a commit.
    """

    place: str = ""                          # where the run is to be seen: a folder or an address
    rows: int = 0                            # that the tracker holds already

    @abstractmethod
    def __init__(self, run: Followed, kept: Mapping[str, Any], rows: int) -> None:
        """Open the tracker for a run."""

    @abstractmethod
    def row(self, row: Row) -> None:
        """Take a row."""

    @abstractmethod
    def artefact(self, artefact: Artefact) -> None:
        """Take a file. The same one may come again."""

    @abstractmethod
    def commit(self) -> Mapping[str, Any]:
        """Bring the rows where they survive this process; return what the next one has to know."""

    @abstractmethod
    def end(self, state: str) -> None:
        """End the run: "finished", "stopped", "failed" or "killed"."""

    def again(self, step: int, time: float) -> None:  # noqa: B027 - most trackers cannot take a row back
        """Take note that the steps after `step` come again."""

    def close(self) -> None:  # noqa: B027 - most hold nothing open
        """Let go of what is open, after an error too."""
