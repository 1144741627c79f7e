"""Draws Rows: a name, and bars, points and whiskers on one axis of values."""

from __future__ import annotations

import html
from collections.abc import Iterator

from powertrain.report import svg
from powertrain.report.chart import Point, Row, Rows, Segment, values
from powertrain.report.svg import CHAR_PX, LINE_PX, TEXT_PX, Scale

NARROW_PX = 560.0            # below, a name stands above its row instead of beside it
BAR_PX = 16.0
LABEL_SHARE = 0.42           # of the width, at most, for names
TICK_PX = 70.0


def draw(drawing: Rows, width: float, *, name: str, title: str, description: str) -> str:
    """The rows as an <svg> of this width; `name` is its own on the page."""
    narrow = width < NARROW_PX
    label_px = 0.0 if narrow else min(max((svg.width_of(row.label) for row in drawing.rows), default=0) + 16,
                                      width * LABEL_SHARE)
    says_px = 0.0 if narrow else max((svg.width_of(row.says, bold=True) for row in drawing.rows), default=0.0)
    says_px = min(says_px + 14 if says_px else 12.0, width * 0.3)
    low, high = svg.limits(values(drawing), log=drawing.axis.log, low=drawing.axis.low, high=drawing.axis.high)
    scale = Scale(low, high, max(label_px, 8.0), width - says_px, drawing.axis.log)
    body, top = _head(drawing, width)
    row_px = 46.0 if narrow else 26.0
    bottom = top + row_px * len(drawing.rows) + 4
    ticks = list(drawing.axis.names) or svg.ticks(
        low, high, log=drawing.axis.log, about=max(2, int((scale.end_px - scale.start_px) / TICK_PX)))
    body += _behind(drawing, scale, ticks, top, bottom)
    for number, row in enumerate(drawing.rows):
        body += _row(row, scale, top + row_px * number, row_px, width, narrow=narrow, says_px=says_px)
    body += _axis(drawing, scale, ticks, bottom)
    return svg.document(body, width, bottom + 2 * LINE_PX + 8, name=name, title=title, description=description)


def _head(drawing: Rows, width: float) -> tuple[list[str], float]:
    body, top = [], 0.0
    if drawing.title:
        body.append(svg.text(0, TEXT_PX, svg.shortened(drawing.title, width), bold=True))
        top += LINE_PX + 4
    marks, height = svg.legend(list(_entries(drawing)), width)
    if marks:
        body.append(svg.element("g", *marks, transform=f"translate(0 {top})"))
        top += height + 4
    return body, top


def _entries(drawing: Rows) -> Iterator[tuple[str, str, str]]:
    found: dict[tuple[str, str], str] = {}
    for row in drawing.rows:
        found |= {(s.label, s.colour): "hatch" if s.hatched else "shade" if s.thin else "box" for s in row.segments if s.label}
        found |= {(p.label, p.colour): p.shape for p in row.points if p.label}
    found |= dict.fromkeys(drawing.legend, "box")
    found |= {(level.label, level.colour): "dashed" if level.dashed else "line" for level in drawing.levels if level.label}
    found |= {(band.label, band.colour): "shade" for band in drawing.bands if band.label}
    return ((label, colour, shape) for (label, colour), shape in found.items())


def _behind(drawing: Rows, scale: Scale, ticks: list[tuple[float, str]], top: float, bottom: float) -> Iterator[str]:
    for band in drawing.bands:
        yield svg.element("rect", x=scale(band.low), y=top, width=max(scale(band.high) - scale(band.low), 1.0),
                          height=bottom - top, class_=f"f-{band.colour} shade")
    for value, _ in ticks:
        if scale.low <= value <= scale.high:
            yield svg.element("path", d=f"M{scale(value):.1f} {top:.1f}V{bottom:.1f}", class_="grid")
    for level in drawing.levels:
        yield svg.element("path", d=f"M{scale(level.value):.1f} {top:.1f}V{bottom:.1f}",
                          class_=f"s-{level.colour} line " + ("dashed" if level.dashed else ""))


def _row(row: Row, scale: Scale, top: float, row_px: float, width: float, *, narrow: bool, says_px: float) -> Iterator[str]:
    middle = top + (row_px - 14 if narrow else row_px / 2)
    if narrow:
        said = f" · {row.says}" if row.says else ""
        yield svg.text(0, top + 15, svg.shortened(row.label + said, width), colour=row.tone if said else "ink")
    else:
        room = scale.start_px - 10
        label = svg.text(room, middle + 4, svg.shortened(row.label, room), anchor="end")
        yield svg.element("g", svg.element("title", html.escape(row.label)), label)
        yield svg.text(width - says_px + 10, middle + 4, svg.shortened(row.says, says_px - 8), colour=row.tone, bold=True)
    for segment in row.segments:
        yield from _segment(segment, scale, middle, row.label)
    for point in row.points:
        yield from _point(point, scale, middle, row.label)


def _segment(segment: Segment, scale: Scale, middle: float, row: str) -> Iterator[str]:
    if not (svg.is_number(segment.start) and svg.is_number(segment.end)):
        return
    left, right = sorted((scale(segment.start), scale(segment.end)))
    height = BAR_PX / 2 if segment.thin else BAR_PX
    width = max(right - left, 0.5)
    shape = (svg.hatched(left, middle - height / 2, width, height, segment.colour) if segment.hatched else
             svg.element("rect", x=left, y=middle - height / 2, width=width, height=height,
                         class_=f"f-{segment.colour} bar" + (" range" if segment.thin else "")))
    said = f"{row}, {segment.label}: {segment.end - segment.start:.4g}" if not segment.thin else \
        f"{row}, {segment.label}: {segment.start:.4g} to {segment.end:.4g}"
    yield svg.element("g", svg.element("title", html.escape(said)), shape)


def _point(point: Point, scale: Scale, middle: float, row: str) -> Iterator[str]:
    if point.value is None or not scale.shows(point.value):
        return
    if point.low is not None and point.high is not None and scale.shows(point.low) and scale.shows(point.high):
        left, right = scale(point.low), scale(point.high)
        yield svg.element("path", d=f"M{left:.1f} {middle - 5:.1f}v10M{left:.1f} {middle:.1f}H{right:.1f}"
                                    f"M{right:.1f} {middle - 5:.1f}v10", class_=f"s-{point.colour} whisker")
    said = f"{row}: {point.value:.4g}" + (f" ({point.low:.4g} to {point.high:.4g})" if point.low is not None
                                          and point.high is not None else "")
    yield svg.element("g", svg.element("title", html.escape(said)),
                      svg.symbol(scale(point.value), middle, point.colour, point.shape))


def _axis(drawing: Rows, scale: Scale, ticks: list[tuple[float, str]], bottom: float) -> Iterator[str]:
    yield svg.element("path", d=f"M{scale.start_px:.1f} {bottom:.1f}H{scale.end_px:.1f}", class_="axis")
    for value, label in ticks:
        if scale.low <= value <= scale.high:
            half = len(label) * CHAR_PX / 2
            yield svg.text(max(scale(value), half), bottom + LINE_PX, label, anchor="middle", colour="quiet")
    yield svg.text((scale.start_px + scale.end_px) / 2, bottom + 2 * LINE_PX + 2,
                   svg.shortened(drawing.axis.label, scale.end_px - scale.start_px + 60), anchor="middle", colour="quiet")
