"""A report as a value: a headline, sections, figures with the numbers they plot. formats.py writes it.

Every figure carries its numbers in tables, so that each way of saying it says the same, and nobody has to measure a
picture.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from powertrain.report.chart import Drawing
from powertrain.report.words import is_number, said

Cell = str | int | float | None
# of the words of verdicts: the colour beside a word; the word says the verdict without its colour
TONES = {"faster": "good", "confirmed": "good", "better": "good", "holds": "good", "inside": "good", "on": "good",
         "harmful": "bad", "invalid": "bad", "does not hold": "bad", "failed": "bad",
         "smaller than claimed": "open", "inconclusive": "open",
         "no effect": "quiet", "not applicable here": "quiet", "off": "quiet"}


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]                 # with units
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""


@dataclass(frozen=True)
class Figure:
    key: str                                 # its own on the page: "loss", "step-time"
    title: str                               # what it shows, as a finding
    drawings: tuple[Drawing, ...]
    caption: str                             # what is shown and how it was measured
    tables: tuple[Table, ...]                # every plotted number
    more: str = ""                           # for who cannot see it, besides the title
    beside: bool = False                     # two drawings a line, where there is room


@dataclass(frozen=True)
class Text:
    words: str


@dataclass(frozen=True)
class Code:
    """To be copied, or text that a model wrote."""

    words: str
    title: str = ""


@dataclass(frozen=True)
class Missing:
    """A figure that was left out, and why."""

    what: str
    because: str


Block = Figure | Table | Text | Code | Missing


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Number:
    value: str
    label: str
    note: str                                # how it was measured, or its interval


@dataclass(frozen=True)
class Findings:
    """What a run or a study shows."""

    verdict: str                             # one sentence
    tone: str                                # "good", "bad" or "open": the colour beside the words
    numbers: tuple[Number, ...]
    cautions: tuple[str, ...]                # what to distrust, the weightiest first
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Page(Findings):
    what: str                                # "run" or a study's kind
    title: str
    about: str                               # what was done, where the title does not say it; may be empty
    made: str                                # by which version, when


def shown(table: Table, most: int) -> list[tuple[Cell, ...]]:
    """Return the rows; of a longer table `most` rows, evenly spread, with the first and the last."""
    rows = table.rows
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def facts(title: str, rows: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Table:
    """Return a table of names and values, without the empty values."""
    known = rows.items() if isinstance(rows, Mapping) else rows
    return Table(("", ""), tuple((name, said(value) if is_number(value) else str(value)) for name, value in known
                                 if value not in (None, "", [], {})), title)
