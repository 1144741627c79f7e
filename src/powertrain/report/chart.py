"""What a figure shows, as values: a plot over two axes, or rows on one. The svg files draw them at any width.

A colour is the name of a CSS variable of the page, so that light and dark are the page's business. A value that is None
or not finite is a gap: nothing is drawn there, and nothing is drawn across it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Value = float | None
# Okabe and Ito's palette, which colour-blind people can tell apart; drawing.css gives each a light and a dark form
COLOURS = ("blue", "orange", "green", "red", "sky", "purple", "yellow", "grey")


@dataclass(frozen=True)
class Axis:
    label: str                               # with its unit
    log: bool = False
    low: float | None = None                 # None: from the data
    high: float | None = None
    names: tuple[tuple[float, str], ...] = ()                # these ticks instead of round numbers


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[tuple[float, Value], ...]
    colour: str
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Dots:
    label: str
    points: tuple[tuple[float, Value], ...]
    colour: str
    shape: str = "circle"                    # "circle", "ring" or "cross"


@dataclass(frozen=True)
class Level:
    """A horizontal line right across."""

    label: str
    value: float
    colour: str = "ink"
    dashed: bool = True


@dataclass(frozen=True)
class Band:
    """Between two heights, right across."""

    label: str
    low: float
    high: float
    colour: str = "grey"


@dataclass(frozen=True)
class Span:
    """Between two places of the x axis, from bottom to top."""

    label: str
    start: float
    end: float
    colour: str = "grey"


@dataclass(frozen=True)
class Moments:
    """Upright marks: something happened at these places of the x axis."""

    label: str
    places: tuple[float, ...]
    colour: str


@dataclass(frozen=True)
class Stack:
    """Layers on each other, constant between neighbouring edges."""

    edges: tuple[float, ...]                 # one more than there are values in a layer
    layers: tuple[tuple[str, str, tuple[float, ...]], ...]   # label, colour, heights


@dataclass(frozen=True)
class Note:
    """Words at a place."""

    x: float
    y: float
    text: str
    colour: str = "ink"


Mark = Line | Dots | Level | Band | Span | Moments | Stack | Note


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
    shape: str = "circle"                    # "circle", "ring", "cross" or "bar" (an upright stroke)


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


def values(drawing: Drawing) -> Iterator[float | None]:
    """Every value along the drawing's value axis, whether it can be drawn or not."""
    if isinstance(drawing, Rows):
        yield from (level.value for level in drawing.levels)
        for row in drawing.rows:
            yield from (edge for segment in row.segments for edge in (segment.start, segment.end))
            yield from (value for point in row.points for value in (point.value, point.low, point.high))
        return
    for mark in drawing.marks:
        if isinstance(mark, (Line, Dots)):
            yield from (y for _, y in mark.points)
        elif isinstance(mark, Level):
            yield mark.value
        elif isinstance(mark, Band):
            yield from (mark.low, mark.high)
        elif isinstance(mark, Stack):
            yield from (sum(heights) for heights in zip(*(layer[2] for layer in mark.layers), strict=True))
            yield 0.0


def places(plot: Plot) -> Iterator[float]:
    """Every place along a plot's x axis."""
    for mark in plot.marks:
        if isinstance(mark, (Line, Dots)):
            yield from (x for x, _ in mark.points)
        elif isinstance(mark, Span):
            yield from (mark.start, mark.end)
        elif isinstance(mark, Moments):
            yield from mark.places
        elif isinstance(mark, Stack):
            yield from mark.edges
        elif isinstance(mark, Note):
            yield mark.x
