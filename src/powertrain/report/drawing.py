"""Draws a plot or rows as SVG of any width."""

import html
import math
from collections.abc import Iterable, Iterator

from powertrain.records.timeline import is_finite
from powertrain.report import chart, svg
from powertrain.report.chart import Band, Level, Mark, Moments, Plot, Row, Rows, Series, Stack
from powertrain.report.svg import CHAR_PX, LINE_PX, TEXT_PX, Entry, Scale

TICK_PX = 70.0               # room that a label on the x axis wants
MOST_MOMENTS = 60            # more upright marks than this would hide the curve: they become ticks at its foot
NARROW_PX = 560.0            # below, a row's name stands above its row instead of beside it
BAR_PX = 16.0
LABEL_SHARE = 0.42           # of the width, at most, for names of rows
DRAWN_ORDER = (Band, Stack, Moments, Series, Level)    # what is behind what; single points are over lines

Ticks = list[tuple[float, str]]


def draw(drawing: chart.Drawing, width: float, *, name: str, title: str, description: str) -> str:
    """Return the drawing as an <svg> of this width. `name` is its own on the page: screen readers find its words by it.

    A plot's data-x says where its x axis lies: two places in pixels, the values there, and its kind.
    """
    if isinstance(drawing, Plot):
        body, height, x = _plot(drawing, width)
        kind = "log" if x.log else "linear"
        where = {"data_x": f"{x.start_px:.1f} {x.end_px:.1f} {x.low:.9g} {x.high:.9g} {kind}"}
    else:
        (body, height), where = _rows(drawing, width), {}
    return svg.element(
        "svg", svg.element("title", html.escape(title), id=f"{name}-title"),
        svg.element("desc", html.escape(description), id=f"{name}-desc"), *body,
        viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", class_="drawing",
        aria_labelledby=f"{name}-title {name}-desc", **where)


def _head(title: str, entries: Iterable[Entry], width: float, gap: float) -> tuple[list[str], float]:
    """Return title and legend, and where the drawing begins below them."""
    body, top = [], 0.0
    if title:
        body.append(svg.text(0, TEXT_PX, svg.shortened(title, width), bold=True))
        top += LINE_PX + gap
    marks, height = svg.legend(list({entry[:2]: entry for entry in entries if entry[0]}.values()), width)
    if marks:
        body.append(svg.element("g", *marks, transform=f"translate(0 {top})"))
        top += height + gap
    return body, top


def _axis(axis: chart.Axis, scale: Scale, ticks: Ticks, bottom: float, widest: float) -> Iterator[str]:
    """Draw the lower axis: its line, the labels of its ticks and its own."""
    yield svg.element("path", d=f"M{scale.start_px:.1f} {bottom:.1f}H{scale.end_px:.1f}", class_="axis")
    for value, label in ticks:
        half = len(label) * CHAR_PX / 2
        yield svg.text(min(max(scale(value), half), widest - half), bottom + LINE_PX + 2, label, anchor="middle",
                       colour="quiet")
    yield svg.text((scale.start_px + scale.end_px) / 2, bottom + 2 * LINE_PX + 3,
                   svg.shortened(axis.label, scale.end_px - scale.start_px + 60), anchor="middle", colour="quiet")


def _ticks(axis: chart.Axis, scale: Scale, about: int | None = None) -> Ticks:
    """Return about so many ticks; without a number, as many as have room on a lower axis."""
    about = about or max(2, int((scale.end_px - scale.start_px) / TICK_PX))
    return [(value, label) for value, label in svg.ticks(scale.low, scale.high, log=axis.log, about=about)
            if scale.low <= value <= scale.high]


# ------------------------------------------------------------------------------------------------ a plot


def _plot(plot: Plot, width: float) -> tuple[list[str], float, Scale]:
    """Return the plot's elements and height, and the scale of its x axis."""
    entries = [entry for mark in plot.marks for entry in _entries(mark)] if plot.legend else []
    body, top = _head(plot.title, entries, width, gap=2)
    body.append(svg.text(0, top + TEXT_PX, svg.shortened(plot.y.label, width), colour="quiet"))
    top += LINE_PX + 2
    bottom = top + plot.height
    extents = [_extent(mark) for mark in plot.marks]
    y_ends = svg.limits((y for _, ys in extents for y in ys), plot.y, room=0.05)
    y = Scale(*y_ends, bottom, top + 4, plot.y.log)
    y_ticks = _ticks(plot.y, y, about=5 if plot.height > 150 else 3)
    left = max([len(label) for _, label in y_ticks], default=1) * CHAR_PX + 12
    x = Scale(*svg.limits((x for xs, _ in extents for x in xs), plot.x, room=0.0), left, width - 14, plot.x.log)
    for value, label in y_ticks:
        body += [svg.element("path", d=f"M{x.start_px:.1f} {y(value):.1f}H{x.end_px:.1f}", class_="grid"),
                 svg.text(x.start_px - 6, y(value) + 4, label, anchor="end", colour="quiet")]
    x_ticks = _ticks(plot.x, x)
    body += [svg.element("path", d=f"M{x(value):.1f} {bottom:.1f}v5", class_="axis") for value, _ in x_ticks]
    body += _axis(plot.x, x, x_ticks, bottom, width)
    for mark in sorted(plot.marks, key=_depth):
        body += _mark(mark, x, y)
    return body, bottom + 2 * LINE_PX + 8, x


def _entries(mark: Mark) -> Iterable[Entry]:
    """Return label, colour and shape of what the legend says of a mark."""
    if isinstance(mark, Stack):
        return [(label, colour, "hatch" if colour == "grey" else "box") for label, colour, _ in mark.layers]
    return [(mark.label, mark.colour, mark.shape)]


def _extent(mark: Mark) -> tuple[Iterable[float], Iterable[chart.Value]]:
    """Return the places and the values that the axes must show for a mark."""
    match mark:
        case Series():
            return [x for x, _ in mark.points], [y for _, y in mark.points]
        case Level():
            return (), (mark.value,)
        case Band():
            return ((mark.low, mark.high), ()) if mark.upright else ((), (mark.low, mark.high))
        case Moments():
            return mark.places, ()
        case Stack():
            return mark.edges, (0.0, *map(sum, zip(*(heights for _, _, heights in mark.layers), strict=True)))


def _depth(mark: Mark) -> float:
    raised = {"faint": -0.5, "circle": 1.5, "ring": 1.5}.get(mark.shape, 0) if isinstance(mark, Series) else 0
    return DRAWN_ORDER.index(type(mark)) + raised - (isinstance(mark, Band) and mark.upright)


def _mark(mark: Mark, x: Scale, y: Scale) -> Iterator[str]:
    match mark:
        case Series():
            yield from _series(mark, x, y)
        case Stack():
            yield from _stack(mark, x, y)
        case Level() if y.shows(mark.value):
            yield svg.element("path", d=f"M{x.start_px:.1f} {y(mark.value):.1f}H{x.end_px:.1f}",
                              class_=f"s-{mark.colour} line dashed")
        case Band() if mark.upright:
            yield svg.stripe(x(mark.low), y.end_px, x(mark.high), y.start_px, mark.colour)
        case Band():
            yield svg.stripe(x.start_px, y(mark.high), x.end_px, y(mark.low), mark.colour)
        case Moments():
            up = "V" + f"{y.end_px:.1f}" if len(mark.places) <= MOST_MOMENTS else "v-8"
            path = "".join(f"M{x(place):.1f} {y.start_px:.1f}{up}" for place in mark.places)
            yield svg.element("path", d=path, class_=f"s-{mark.colour} moment")


def _series(series: Series, x: Scale, y: Scale) -> Iterator[str]:
    pieces = list(_pieces(series.points, x, y))
    if series.note and pieces:
        at, height = pieces[-1][-1]
        end = at > (x.start_px + x.end_px) / 2
        yield svg.text(at + (-8 if end else 8), height - 7, series.note, anchor="end" if end else "start",
                       colour=series.colour, bold=True)
    if series.shape in ("circle", "ring"):
        yield from (svg.symbol(*place, series.colour, series.shape) for piece in pieces for place in piece)
        return
    path = "".join("M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in _thinned(piece))
                   for piece in pieces if len(piece) > 1)
    if path:
        yield svg.element("path", d=path, class_=f"s-{series.colour} line {series.shape}")
    yield from (svg.symbol(*piece[0], series.colour, "circle") for piece in pieces if len(piece) == 1)


def _pieces(points: chart.Points, x: Scale, y: Scale) -> Iterator[list[tuple[float, float]]]:
    """Yield the unbroken pieces of a series, in pixels."""
    piece: list[tuple[float, float]] = []
    for at, value in (*points, (0.0, None)):
        if value is not None and y.shows(value) and x.shows(at):
            piece.append((x(at), y(value)))
        elif piece:
            yield piece
            piece = []


def _thinned(piece: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the piece; where many points share a pixel, their least and greatest, so that no spike is lost."""
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


def _stack(stack: Stack, x: Scale, y: Scale) -> Iterator[str]:
    floor = [0.0] * (len(stack.edges) - 1)
    for _, colour, heights in stack.layers:
        ceiling = [low + height for low, height in zip(floor, heights, strict=True)]
        if any(heights):
            path = _steps(stack.edges, ceiling, x, y) + _steps(stack.edges, floor, x, y)[::-1]
            d = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in path) + "Z"
            yield svg.element("path", d=d, class_=f"f-{colour} layer" + (" shade2" if colour == "grey" else ""))
        floor = ceiling


def _steps(edges: tuple[float, ...], heights: list[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    return [(x(edge), y(height)) for i, height in enumerate(heights) for edge in edges[i:i + 2]]


# ------------------------------------------------------------------------------------------------ rows


def _rows(drawing: Rows, width: float) -> tuple[list[str], float]:
    """Return the rows' elements and height."""
    narrow = width < NARROW_PX
    label_px = 0.0 if narrow else min(max((svg.width_of(row.label) for row in drawing.rows), default=0) + 16,
                                      width * LABEL_SHARE)
    says_px = 0.0 if narrow else max((svg.width_of(row.says, bold=True) for row in drawing.rows), default=0.0)
    says_px = min(says_px + 14 if says_px else 12.0, width * 0.3)
    scale = Scale(*svg.limits(_row_values(drawing), drawing.axis), max(label_px, 8.0), width - says_px, drawing.axis.log)
    body, top = _head(drawing.title, _row_entries(drawing), width, gap=4)
    row_px = 46.0 if narrow else 26.0
    bottom = top + row_px * len(drawing.rows) + 4
    ticks = _ticks(drawing.axis, scale)
    body += [svg.stripe(scale(band.low), top, scale(band.high), bottom, band.colour) for band in drawing.bands]
    body += [svg.element("path", d=f"M{scale(value):.1f} {top:.1f}V{bottom:.1f}", class_="grid") for value, _ in ticks]
    body += [svg.element("path", d=f"M{scale(level.value):.1f} {top:.1f}V{bottom:.1f}",
                         class_=f"s-{level.colour} line dashed") for level in drawing.levels]
    for number, row in enumerate(drawing.rows):
        body += _row(row, scale, top + row_px * number, row_px, width, narrow=narrow, says_px=says_px)
    body += _axis(drawing.axis, scale, ticks, bottom, width)
    return body, bottom + 2 * LINE_PX + 8


def _row_values(drawing: Rows) -> Iterator[chart.Value]:
    yield from (level.value for level in drawing.levels)
    for row in drawing.rows:
        yield from (edge for segment in row.segments for edge in (segment.start, segment.end))
        yield from (value for point in row.points for value in (point.value, point.low, point.high))


def _row_entries(drawing: Rows) -> Iterator[Entry]:
    for row in drawing.rows:
        yield from ((s.label, s.colour, "hatch" if s.hatched else "shade" if s.thin else "box") for s in row.segments)
        yield from ((p.label, p.colour, p.shape) for p in row.points)
    yield from ((label, colour, "box") for label, colour in drawing.legend)
    across: tuple[Mark, ...] = (*drawing.levels, *drawing.bands)
    yield from (entry for mark in across for entry in _entries(mark))


def _row(row: Row, scale: Scale, top: float, row_px: float, width: float, *, narrow: bool, says_px: float) -> Iterator[str]:
    middle = top + (row_px - 14 if narrow else row_px / 2)
    if narrow:
        said = f" · {row.says}" if row.says else ""
        yield svg.text(0, top + 15, svg.shortened(row.label + said, width), colour=row.tone if said else "ink")
    else:
        room = scale.start_px - 10
        yield svg.told(row.label, svg.text(room, middle + 4, svg.shortened(row.label, room), anchor="end"))
        yield svg.text(width - says_px + 10, middle + 4, svg.shortened(row.says, says_px - 8), colour=row.tone, bold=True)
    for segment in row.segments:
        if is_finite(segment.start) and is_finite(segment.end):
            yield _segment(segment, scale, middle, row.label)
    for point in row.points:
        if point.value is not None and scale.shows(point.value):
            yield from _point(point, point.value, scale, middle, row.label)


def _segment(segment: chart.Segment, scale: Scale, middle: float, row: str) -> str:
    left, right = sorted((scale(segment.start), scale(segment.end)))
    height = BAR_PX / 2 if segment.thin else BAR_PX
    width = max(right - left, 0.5)
    shape = (svg.hatched(left, middle - height / 2, width, height, segment.colour) if segment.hatched else
             svg.element("rect", x=left, y=middle - height / 2, width=width, height=height,
                         class_=f"f-{segment.colour} bar" + (" range" if segment.thin else "")))
    says = f"{segment.start:.4g} to {segment.end:.4g}" if segment.thin else f"{segment.end - segment.start:.4g}"
    return svg.told(f"{row}, {segment.label}: {says}", shape)


def _point(point: chart.Point, value: float, scale: Scale, middle: float, row: str) -> Iterator[str]:
    says = f"{row}: {value:.4g}"
    if point.low is not None and point.high is not None:
        says += f" ({point.low:.4g} to {point.high:.4g})"
        if scale.shows(point.low) and scale.shows(point.high):
            left, right = scale(point.low), scale(point.high)
            yield svg.element("path", d=f"M{left:.1f} {middle - 5:.1f}v10M{left:.1f} {middle:.1f}H{right:.1f}"
                                        f"M{right:.1f} {middle - 5:.1f}v10", class_=f"s-{point.colour} whisker")
    yield svg.told(says, svg.symbol(scale(value), middle, point.colour, point.shape))
