"""Curves of dots for a terminal: eight dots of Unicode's Braille patterns in each character."""

import statistics
from collections.abc import Iterator, Mapping
from itertools import pairwise

from rich.text import Text

from powertrain.records.sizes import digits
from powertrain.records.timeline import is_finite
from powertrain.report.chart import Points, Value

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))          # of U+2800, by row and column
LABEL = 7                    # characters of a label, before the curve
MEAN_OF = 4                  # columns of dots: a mean over each such group is a calmer line


def draw(title: str, curves: Mapping[str, Points], width: int, height: int, *, plain: bool) -> Iterator[Text]:
    """Yield the title, `height` lines of curves, by their colours, and the ends of the x axis. `plain`: in ASCII only."""
    columns = max(2, width - LABEL - 1)
    xs = [x for points in curves.values() for x, _ in points] or [0.0]
    means = {colour: _means(points, min(xs), max(xs), 2 * columns) for colour, points in curves.items()}
    known = [y for found in means.values() for _, y in found if y is not None] or [0.0]
    high, rows_each = max(known), (4 * height - 1) / ((max(known) - min(known)) or 1.0)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for colour, found in means.items():
        for x, ys in _columns(found):
            ends = [round((high - y) * rows_each) for y in ys]
            for row in range(min(ends), max(ends) + 1):
                cells[row // 4, x // 2] = cells.get((row // 4, x // 2), (0, ""))[0] | DOTS[row % 4][x % 2], colour
    yield Text(title, "bold")
    for row in range(height):
        label = {0: digits(high), height - 1: digits(min(known))}.get(row, "")
        shown = (cells.get((row, column), (0, "")) for column in range(columns))
        yield Text.assemble((f"{label:>{LABEL}} ", "dim"), *(
            (" " if not bits else "*" if plain else chr(0x2800 + bits), colour) for bits, colour in shown))
    last = f"step {max(xs):,.0f}"
    yield Text(f"{'':{LABEL}} {min(xs):<{columns - len(last)},.0f}{last}", "dim")


def _means(points: Points, left: float, right: float, columns: int) -> list[tuple[int, Value]]:
    """Return the mean of the finite values in each column of dots, or group of such; None where none is finite."""
    bins: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - left) / ((right - left) or 1.0) * (columns - 1))
        found = bins.setdefault(column if len(points) < columns else column // MEAN_OF * MEAN_OF, [])
        found.extend([y] if is_finite(y) else [])
    return [(column, statistics.fmean(found) if found else None) for column, found in sorted(bins.items())]


def _columns(means: list[tuple[int, Value]]) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield columns of dots, and from where to where the line goes in each. A gap stays a gap."""
    for (x0, y0), (x1, y1) in pairwise([(0, None), *means]):
        if y1 is not None:
            y0, x0 = (y1, x1 - 1) if y0 is None else (y0, x0)
            slope = (y1 - y0) / (x1 - x0)
            yield from ((x, (y0 + slope * (x - 1 - x0), y0 + slope * (x - x0))) for x in range(x0 + 1, x1 + 1))
