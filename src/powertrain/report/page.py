"""A report as a value: a headline, sections, figures with the numbers they plot. formats.py writes it.

Every figure carries its numbers in tables, so that each way of saying it says the same, and nobody has to measure a
picture.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.report.chart import Drawing

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

    @property
    def description(self) -> str:
        return self.more or self.title


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
class Page:
    what: str                                # "run" or a study's kind
    title: str
    about: str                               # what was done, where the title does not say it; may be empty
    verdict: str                             # one sentence
    tone: str                                # "good", "bad" or "open": the colour beside the words
    numbers: tuple[Number, ...]
    cautions: tuple[str, ...]                # what to distrust, the weightiest first
    sections: tuple[Section, ...]
    made: str                                # by which version, when


def said(value: Cell) -> str:
    """Return a cell as text: numbers with five digits; - for a value that is absent or not finite."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1e5 and value == round(value)):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def shown(table: Table, most: int) -> list[tuple[Cell, ...]]:
    """Return the rows; of a longer table `most` rows, evenly spread, with the first and the last."""
    rows = table.rows
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def is_number(value: Cell) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def several(number: int, noun: str) -> str:
    """Return '1 step' or '1,200 steps'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def labelled(label: str, lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return rows of which the first has the label."""
    return [("" if number else label, line) for number, line in enumerate(lines)]


def pairs(settings: Mapping[str, Any]) -> str:
    """Return settings as 'examples=4, keep=True'."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def pins_in_words(pins: Mapping[str, Any]) -> str:
    """Return pins as 'micro_batch (examples=4), threads off'."""
    return ", ".join(f"{name} off" if pin == "off" else f"{name} ({pairs(pin)})" if isinstance(pin, Mapping) and pin else name
                     for name, pin in pins.items())


def figures(page: Page) -> list[Figure]:
    return [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]


def facts(title: str, rows: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Table:
    """Return a table of names and values, without the empty values."""
    known = rows.items() if isinstance(rows, Mapping) else rows
    return Table(("", ""), tuple((name, said(value) if is_number(value) else str(value)) for name, value in known
                                 if value not in (None, "", [], {})), title)
