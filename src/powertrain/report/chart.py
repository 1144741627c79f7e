"""A figure's drawing as a value: a plot over two axes, or rows on one. drawing.py makes SVG of either.

A colour is the name of a CSS variable of the page, so that light and dark are the page's business. A value that is None
or not finite is a gap: nothing is drawn there, and nothing is drawn across it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

Value = float | None
Points = tuple[tuple[float, Value], ...]
# of lines that have no meaning of their own; colour-blind people can tell them apart (Okabe and Ito)
COLOURS = ("blue", "orange", "green", "red", "purple", "sky")
COMPONENT_COLOURS = ("blue", "green", "sky", "orange", "purple", "yellow", "red", "ink")       # of parts of a bar


@dataclass(frozen=True)
class Axis:
    label: str                               # with its unit
    log: bool = False
    low: float | None = None                 # None: from the data
    high: float | None = None


@dataclass(frozen=True)
class Series:
    label: str
    points: Points
    colour: str
    shape: str = "line"                      # "line", "faint" or "dashed"; of single points "circle" or "ring"
    note: str = ""                           # words beside the last point


@dataclass(frozen=True)
class Level:
    """A dashed line right across: lying in a plot, upright in rows."""

    label: str
    value: float
    colour: str = "ink"
    shape: ClassVar[str] = "dashed"


@dataclass(frozen=True)
class Band:
    """A stripe right across: in a plot between two values or, upright, between two places of the x axis; upright in rows."""

    label: str
    low: float
    high: float
    colour: str = "grey"
    upright: bool = False
    shape: ClassVar[str] = "shade"


@dataclass(frozen=True)
class Moments:
    """Upright marks: something happened at these places of the x axis."""

    label: str
    places: tuple[float, ...]
    colour: str
    shape: ClassVar[str] = "upright"


@dataclass(frozen=True)
class Stack:
    """Layers on each other, constant between neighbouring edges."""

    edges: tuple[float, ...]                 # one more than there are values in a layer
    layers: tuple[tuple[str, str, tuple[float, ...]], ...]   # label, colour, heights


Mark = Series | Level | Band | Moments | Stack


@dataclass(frozen=True)
class Plot:
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    title: str = ""                          # of a panel among others
    height: float = 230.0
    legend: bool = True                      # False where the drawing above it has the same one


@dataclass(frozen=True)
class Segment:
    """A bar's piece, from `start` to `end` of the value axis."""

    start: float
    end: float
    colour: str
    label: str = ""                          # what the legend calls this colour
    thin: bool = False                       # half as high: a range behind a point
    hatched: bool = False


@dataclass(frozen=True)
class Point:
    value: Value
    colour: str = "ink"
    low: Value = None                        # whisker
    high: Value = None
    label: str = ""
    shape: str = "circle"                    # "circle", "ring" or "bar" (an upright stroke)


@dataclass(frozen=True)
class Row:
    label: str
    segments: tuple[Segment, ...] = ()
    points: tuple[Point, ...] = ()
    says: str = ""                           # words at the right end
    tone: str = "ink"                        # their colour


@dataclass(frozen=True)
class Rows:
    """Named rows over one axis of values: bars, intervals, claimed against measured."""

    axis: Axis
    rows: tuple[Row, ...]
    levels: tuple[Level, ...] = ()
    bands: tuple[Band, ...] = ()
    title: str = ""
    legend: tuple[tuple[str, str], ...] = () # label and colour of what no segment or point names


Drawing = Plot | Rows


def stacked(parts: Mapping[str, float], whole: float, colours: Mapping[str, str] | Sequence[str],
            hatched: str = "") -> tuple[Segment, ...]:
    """Return the pieces of a bar that `parts` fill one after the other, each divided by `whole`.

    `colours`: of each part by its name, or to be used in turn. `hatched`: the part that is no single thing.
    """
    shown = {name: size for name, size in parts.items() if size}
    edges = pairwise(accumulate(shown.values(), initial=0.0))
    return tuple(Segment(start / whole, end / whole,
                         colours[name] if isinstance(colours, Mapping) else colours[number % len(colours)],
                         name.replace("_", " "), hatched=name == hatched)
                 for number, (name, (start, end)) in enumerate(zip(shown, edges, strict=False)))
