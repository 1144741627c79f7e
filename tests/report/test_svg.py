"""Ticks, scales and what is drawn of values that cannot be drawn."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as xml

import pytest
from hypothesis import given
from hypothesis import strategies as some

from powertrain.report import svg
from powertrain.report.chart import Axis, Plot, Point, Row, Rows, Segment, Series
from powertrain.report.drawing import draw

NUMBERS = some.floats(allow_nan=True, allow_infinity=True, width=32) | some.none()


def parsed(text: str) -> xml.Element:
    return xml.fromstring(text)


@given(low=some.floats(-1e9, 1e9), span=some.floats(1e-6, 1e9), about=some.integers(2, 9))
def test_ticks_lie_within_the_axis_and_have_different_labels(low, span, about):
    if abs(low) > span * 1e6:
        return
    found = svg.ticks(low, low + span, log=False, about=about)
    assert all(low - span * 1e-6 <= value <= low + span * (1 + 1e-6) for value, _ in found)
    assert len({label for _, label in found}) == len(found) <= 2 * about + 2


@pytest.mark.parametrize(("low", "high", "labels"), [
    (1.0, 1000.0, ["1", "10", "100", "1000"]), (0.9, 1.1, ["0.90", "0.95", "1.00", "1.05", "1.10"]),
    (2e9, 5e11, ["3 G", "10 G", "30 G", "100 G", "300 G"])])
def test_ticks_of_a_logarithmic_axis(low, high, labels):
    assert [label for _, label in svg.ticks(low, high, log=True, about=5)] == labels


@given(some.lists(some.tuples(some.integers(0, 500), NUMBERS), max_size=60), some.booleans())
def test_a_plot_of_any_values_is_whole_xml_without_a_number_that_is_none(points, log):
    marks = Series("raw", tuple(points), "blue"), Series("dots", tuple(points), "red", "circle")
    plot = Plot(Axis("x"), Axis("y", log=log), marks)
    drawn = draw(plot, 344, name="n", title="a <title>", description="&")
    parsed(drawn)
    assert not re.search(r"nan|inf|None", drawn)


@given(some.lists(NUMBERS, min_size=1, max_size=8), some.booleans())
def test_rows_of_any_values_are_whole_xml_and_lie_within_the_drawing(found, log):
    rows = tuple(Row(f"<row {i}>", (Segment(0.0 if value is None else value, 1.0, "blue", "part"),),
                     (Point(value, "red", value, value, "point"),), "says") for i, value in enumerate(found))
    drawn = draw(Rows(Axis("x", log=log), rows), 860, name="n", title="t", description="d")
    parsed(drawn)
    assert not re.search(r"nan|\binf|None", drawn)
    assert all(-1 <= float(x) <= 861 for x in re.findall(r'(?:cx|x)="([-\d.]+)"', drawn))


def test_a_line_is_broken_where_a_value_is_missing():
    points = ((0, 1.0), (1, 2.0), (2, None), (3, 2.0), (4, math.nan), (5, 1.0), (6, 3.0))
    drawn = draw(Plot(Axis("x"), Axis("y"), (Series("l", points, "blue"),)), 400, name="n", title="t", description="d")
    path, = re.findall(r'd="([^"]*)" class="s-blue line line"', drawn[drawn.index("</g>"):])
    assert path.count("M") == 2
    assert drawn.count("<circle") == 1       # a value with gaps on both sides is a point


def test_a_spike_among_many_points_stays():
    points = tuple((i, 9.0 if i == 7777 else math.sin(i)) for i in range(20_000))
    drawn = draw(Plot(Axis("x"), Axis("y"), (Series("l", points, "blue"),)), 400, name="n", title="t", description="d")
    path = max(re.findall(r'd="([^"]*)"', drawn), key=len)
    heights = sorted(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path))
    assert len(drawn) < 60_000
    assert heights[0] < heights[1] - 50
