"""Draws a Plot: lines, dots, bands, stacked areas over two axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from powertrain.report import svg
from powertrain.report.chart import Axis, Band, Dots, Level, Line, Mark, Moments, Note, Plot, Span, Stack, places, values
from powertrain.report.svg import CHAR_PX, LINE_PX, TEXT_PX, Scale

TICK_PX = 70.0               # room that a label on the x axis wants
MOST_MOMENTS = 60            # more upright marks than this would hide the curve: they become ticks at its foot


def draw(plot: Plot, width: float, *, name: str, title: str, description: str) -> str:
    """The plot as an <svg> of this width; `name` is its own on the page."""
    head, top = _head(plot, width)
    y_low, y_high = _limits(plot.y, values(plot), room=0.05)
    x_low, x_high = _limits(plot.x, places(plot), room=0.0)
    y_ticks = list(plot.y.names) or svg.ticks(y_low, y_high, log=plot.y.log, about=5 if plot.height > 150 else 3)
    left = max([len(label) for _, label in y_ticks], default=1) * CHAR_PX + 12
    x = Scale(x_low, x_high, left, width - 14, plot.x.log)
    bottom = top + plot.height
    y = Scale(y_low, y_high, bottom, top + 4, plot.y.log)
    body = [*head, *_grid(plot, x, y, y_ticks, bottom, width)]
    for mark in sorted(plot.marks, key=_depth):
        body += _mark(mark, x, y)
    return svg.document(body, width, bottom + 2 * LINE_PX + 8, name=name, title=title, description=description)


def _head(plot: Plot, width: float) -> tuple[list[str], float]:
    """Panel title, legend and the y axis's label above the plot, and where the plot begins."""
    body, top = [], 0.0
    if plot.title:
        body.append(svg.text(0, TEXT_PX, svg.shortened(plot.title, width), bold=True))
        top += LINE_PX + 2
    marks, height = svg.legend(list(_entries(plot)) if plot.legend else [], width)
    if marks:
        body.append(svg.element("g", *marks, transform=f"translate(0 {top})"))
        top += height + 2
    body.append(svg.text(0, top + TEXT_PX, svg.shortened(plot.y.label, width), colour="quiet"))
    return body, top + LINE_PX + 2


def _entries(plot: Plot) -> Iterator[tuple[str, str, str]]:
    seen = set()
    for mark in plot.marks:
        if isinstance(mark, Stack):
            yield from ((label, colour, "hatch" if colour == "grey" else "box") for label, colour, _ in mark.layers)
        elif not isinstance(mark, Note) and mark.label and mark.label not in seen:
            seen.add(mark.label)
            yield mark.label, mark.colour, _shape(mark)


def _shape(mark: Mark) -> str:
    if isinstance(mark, Dots):
        return mark.shape
    if isinstance(mark, Moments):
        return "upright"
    if isinstance(mark, (Band, Span)):
        return "shade"
    if isinstance(mark, Line) and mark.faint:
        return "faint"
    return "dashed" if isinstance(mark, (Line, Level)) and mark.dashed else "line"


def _limits(axis: Axis, found: Iterable[float | None], room: float) -> tuple[float, float]:
    return svg.limits(found, log=axis.log, low=axis.low, high=axis.high, room=room)


def _grid(plot: Plot, x: Scale, y: Scale, y_ticks: list[tuple[float, str]], bottom: float, width: float) -> Iterator[str]:
    for value, label in y_ticks:
        if y.low <= value <= y.high:
            yield svg.element("path", d=f"M{x.start_px:.1f} {y(value):.1f}H{x.end_px:.1f}", class_="grid")
            yield svg.text(x.start_px - 6, y(value) + 4, label, anchor="end", colour="quiet")
    about = max(2, int((x.end_px - x.start_px) / TICK_PX))
    for value, label in plot.x.names or svg.ticks(x.low, x.high, log=plot.x.log, about=about):
        if x.low <= value <= x.high:
            yield svg.element("path", d=f"M{x(value):.1f} {bottom:.1f}v5", class_="axis")
            yield svg.text(min(x(value), width - len(label) * CHAR_PX / 2), bottom + LINE_PX + 2, label, anchor="middle",
                           colour="quiet")
    yield svg.element("path", d=f"M{x.start_px:.1f} {bottom:.1f}H{x.end_px:.1f}", class_="axis")
    yield svg.text((x.start_px + x.end_px) / 2, bottom + 2 * LINE_PX + 3,
                   svg.shortened(plot.x.label, x.end_px - x.start_px + 30), anchor="middle", colour="quiet")


def _depth(mark: Mark) -> int:
    """What lies behind what."""
    order = (Span, Band, Stack, Moments, Line, Level, Dots, Note)
    faint = isinstance(mark, Line) and mark.faint
    return 2 * next(place for place, kind in enumerate(order) if isinstance(mark, kind)) - faint


def _mark(mark: Mark, x: Scale, y: Scale) -> list[str]:
    if isinstance(mark, Line):
        return _line(mark, x, y)
    if isinstance(mark, Dots):
        return [svg.symbol(x(at), y(value), mark.colour, mark.shape) for at, value in mark.points
                if value is not None and y.shows(value) and x.shows(at)]
    if isinstance(mark, Stack):
        return _stack(mark, x, y)
    if isinstance(mark, Moments):
        up = "V" + f"{y.end_px:.1f}" if len(mark.places) <= MOST_MOMENTS else "v-8"
        path = "".join(f"M{x(place):.1f} {y.start_px:.1f}{up}" for place in mark.places)
        return [svg.element("path", d=path, class_=f"s-{mark.colour} moment")] if path else []
    if isinstance(mark, Level):
        style = "dashed" if mark.dashed else ""
        return [svg.element("path", d=f"M{x.start_px:.1f} {y(mark.value):.1f}H{x.end_px:.1f}",
                            class_=f"s-{mark.colour} line {style}")] if y.shows(mark.value) else []
    if isinstance(mark, Note):
        end = x(mark.x) > (x.start_px + x.end_px) / 2
        return [svg.text(x(mark.x) + (-8 if end else 8), y(mark.y) - 7, mark.text, anchor="end" if end else "start",
                         colour=mark.colour, bold=True)]
    return [_shade(mark, x, y)]


def _shade(mark: Band | Span, x: Scale, y: Scale) -> str:
    if isinstance(mark, Band):
        top, bottom = y(mark.high), y(mark.low)
        return svg.element("rect", x=x.start_px, y=top, width=x.end_px - x.start_px, height=max(bottom - top, 1.0),
                           class_=f"f-{mark.colour} shade")
    return svg.element("rect", x=x(mark.start), y=y.end_px, width=max(x(mark.end) - x(mark.start), 1.0),
                       height=y.start_px - y.end_px, class_=f"f-{mark.colour} shade")


def _line(line: Line, x: Scale, y: Scale) -> list[str]:
    style = " ".join(word for word, on in (("faint", line.faint), ("dashed", line.dashed)) if on)
    drawn, lone = [], []
    for piece in _pieces(line.points, x, y):
        if len(piece) == 1:
            lone.append(svg.symbol(*piece[0], line.colour, "circle"))
        else:
            drawn.append("M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in piece))
    path = [svg.element("path", d="".join(drawn), class_=f"s-{line.colour} line {style}")] if drawn else []
    return path + lone


def _pieces(points: tuple[tuple[float, float | None], ...], x: Scale, y: Scale) -> Iterator[list[tuple[float, float]]]:
    """Unbroken pieces in pixels. Where many points share a pixel its least and greatest stay, so that no spike is lost."""
    piece: list[tuple[float, float]] = []
    for at, value in points:
        if value is None or not y.shows(value) or not x.shows(at):
            if piece:
                yield _thinned(piece)
            piece = []
        else:
            piece.append((x(at), y(value)))
    if piece:
        yield _thinned(piece)


def _thinned(piece: list[tuple[float, float]]) -> list[tuple[float, float]]:
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in piece:
        columns.setdefault(math.floor(point[0]), []).append(point)
    if len(piece) <= 4 * len(columns):
        return piece
    kept = []
    for column in columns.values():
        lowest, highest = (pick(column, key=lambda point: point[1]) for pick in (min, max))
        kept += sorted({column[0], lowest, highest, column[-1]})
    return kept


def _stack(stack: Stack, x: Scale, y: Scale) -> list[str]:
    floor = [0.0] * (len(stack.edges) - 1)
    body = []
    for _, colour, heights in stack.layers:
        ceiling = [low + height for low, height in zip(floor, heights, strict=True)]
        if any(heights):
            path = _steps(stack.edges, ceiling, x, y) + _steps(stack.edges, floor, x, y)[::-1]
            d = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in path) + "Z"
            body.append(svg.element("path", d=d, class_=f"f-{colour} layer" + (" shade2" if colour == "grey" else "")))
        floor = ceiling
    return body


def _steps(edges: tuple[float, ...], heights: list[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    return [(x(edge), y(height)) for i, height in enumerate(heights) for edge in edges[i:i + 2]]
