"""A page as one HTML file: nothing is loaded, no script runs, light or dark as the reader's system is.

page.html is the template, page.css and drawing.css the styles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from powertrain.report import drawing as drawings
from powertrain.report.chart import Drawing
from powertrain.report.page import TONES, Cell, Figure, Page, Table, is_number, said, several, shown

MOST_ROWS = 200              # of a data table on the page; report.json has all
LONG_TABLE = 60              # rows; longer tables are folded
LONG_CELL, SHORT_CELL = 48, 18               # characters
COMMAND = re.compile("`([^`]+)`")
SIZES = {"wide_px": 860.0, "beside_px": 416.0, "narrow_px": 344.0, "most_rows": MOST_ROWS, "long_table": LONG_TABLE}


def write(page: Page) -> str:
    """Return the page as one HTML file."""
    environment = Environment(loader=PackageLoader("powertrain", "report"), autoescape=True, undefined=StrictUndefined,
                              keep_trailing_newline=True)
    environment.filters |= {"prose": _prose, "cells": _cells, "draw": _draw, "several": several,
                            "kind": lambda block: type(block).__name__}
    sheet = Markup(style("drawing.css") + style("page.css"))
    return environment.get_template("page.html").render(page=page, style=sheet, **SIZES)


def style(name: str) -> str:
    """Return a style sheet of this room."""
    return (resources.files("powertrain.report") / name).read_text(encoding="utf-8")


def _prose(words: str) -> Markup:
    """Return text in which a command between backticks is code."""
    return Markup(COMMAND.sub(r"<code>\1</code>", str(escape(words))))


def _draw(drawing: Drawing, width: float, figure: Figure, form: str, number: int) -> Markup:
    title = f"{figure.title}: {drawing.title}" if drawing.title else figure.title
    return Markup(drawings.draw(drawing, width, name=f"{figure.key}-{form}-{number}", title=title,
                                description=figure.description))


def _cells(table: Table) -> Iterator[list[tuple[str, str, str]]]:
    """Yield the rows that are shown: text, class and tone of each cell."""
    kinds = [_kind(column) for column in zip(*table.rows, strict=True)]
    for row in shown(table, MOST_ROWS):
        yield [(said(cell), kind, TONES.get(cell, "") if isinstance(cell, str) else "")
               for cell, kind in zip(row, kinds, strict=True)]


def _kind(column: Sequence[Cell]) -> str:
    """Return the class of a column: numbers stand right, long texts get some width, names are not broken."""
    if any(map(is_number, column)) and not any(isinstance(cell, str) for cell in column):
        return "number"
    longest = max((len(said(cell)) for cell in column), default=0)
    return "says" if longest > LONG_CELL else "short" if longest <= SHORT_CELL else ""
