"""A page as HTML, Markdown and JSON.

The HTML is one file: nothing is loaded, no script runs, light or dark as the reader's system is. Its template is page.html, its
styles are page.css and drawing.css. Markdown has no pictures (page.md.jinja); audits use `render` too (audit.md.jinja).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from powertrain.records import several
from powertrain.report import drawing as drawings
from powertrain.report.chart import Drawing, Plot
from powertrain.report.page import TONES, Block, Cell, Code, Figure, Missing, Page, Table, shown
from powertrain.report.words import is_number, said

MOST_ROWS, MOST_ROWS_IN_MARKDOWN = 200, 40   # of a table; report.json has all
LONG_TABLE = 60              # rows; longer tables are folded
LONG_CELL, SHORT_CELL = 48, 18               # characters
FILE_PX = 640.0              # width of a picture in a file of its own
COMMAND = re.compile("`([^`]+)`")
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")
SIZES = {"wide_px": 860.0, "beside_px": 416.0, "narrow_px": 344.0, "most_rows": MOST_ROWS, "long_table": LONG_TABLE}


def render(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Return a template of this room, filled. Only HTML's values are escaped: `escaped`, `prose` and `code` do it elsewhere."""
    return _template(template, tuple(filters.items())).render(values)


@cache
def _template(name: str, filters: tuple[tuple[str, Callable[..., Any]], ...]) -> Template:
    is_html = name.endswith(".html")
    environment = Environment(loader=PackageLoader("powertrain", "report"), autoescape=is_html, undefined=StrictUndefined,
                              trim_blocks=not is_html, lstrip_blocks=not is_html, keep_trailing_newline=True)
    environment.filters |= {"escaped": escaped, "prose": prose, "code": code, "kind": lambda block: type(block).__name__,
                            **dict(filters)}
    return environment.get_template(name)


# ------------------------------------------------------------------------------------------------ HTML


def html(page: Page) -> str:
    """Return the page as one HTML file."""
    return render("page.html", FILTERS, page=page, style=Markup(style("drawing.css") + style("page.css")), **SIZES)


def body(page: Page) -> str:
    """Return the page without what makes it a file of its own, for a page that has the two styles."""
    return render("body.html", FILTERS, page=page, **SIZES)


def html_blocks(blocks: Sequence[Block]) -> Markup:
    """Return tables, figures and texts as HTML, for such a page."""
    return Markup(render("blocks.html", FILTERS, blocks=blocks, **SIZES))


def style(name: str) -> str:
    """Return a style sheet of this room."""
    return (resources.files("powertrain.report") / name).read_text(encoding="utf-8")


def svg_file(plot: Plot, *, title: str, description: str) -> str:
    """Return a plot as an SVG file that needs nothing else, for light and dark pages."""
    first, _, rest = drawings.draw(plot, FILE_PX, name="plot", title=title, description=description).partition(">")
    sheet = f"svg{{background:var(--paper);font-family:system-ui,sans-serif}}{style('drawing.css')}"
    return f'{first} xmlns="http://www.w3.org/2000/svg"><style>{sheet}</style>{rest}\n'


def html_prose(words: str) -> Markup:
    """Return text in which a command between backticks is code."""
    return Markup(COMMAND.sub(r"<code>\1</code>", str(escape(words))))


def _draw(drawing: Drawing, width: float, figure: Figure, form: str, number: int) -> Markup:
    title = f"{figure.title}: {drawing.title}" if drawing.title else figure.title
    return Markup(drawings.draw(drawing, width, name=f"{figure.key}-{form}-{number}", title=title,
                                description=figure.more or figure.title))


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


FILTERS: Mapping[str, Callable[..., Any]] = {"prose": html_prose, "cells": _cells, "draw": _draw, "several": several}

# ------------------------------------------------------------------------------------------------ Markdown


def markdown(page: Page) -> str:
    """Return the page as Markdown, for a README or a review. The pictures are in the HTML."""
    return render("page.md.jinja", {"alignments": _alignments, "shown": _shown, "fence": _fence},
                  page=page, most_rows=MOST_ROWS_IN_MARKDOWN)


def _shown(table: Table) -> list[list[str]]:
    return [[prose(said(cell), "\\|").replace("\n", "<br>") for cell in row] for row in shown(table, MOST_ROWS_IN_MARKDOWN)]


def _alignments(table: Table) -> list[str]:
    """Return a ruler for each column: numbers stand right."""
    columns = [[row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns))]
    return ["---:" if column and all(is_number(cell) for cell in column) else "---" for column in columns]


def _fence(words: str) -> str:
    """Return backticks that no line of the words ends."""
    return "`" * max(3, _longest_run(words) + 1)


def _longest_run(words: str) -> int:
    return max((len(run) for run in re.findall("`+", words)), default=0)


def escaped(words: str) -> str:
    """Return the text on one line, with every character escaped that Markdown or HTML would interpret."""
    return SPECIAL.sub(r"\\\1", " ".join(words.split("\n"))).replace("\\<", "&lt;").replace("\\>", "&gt;")


def prose(text: str, bar: str = "|") -> str:
    """Return the text escaped, except for code in backticks. `bar` replaces a | in code: a table needs `\\|`."""
    return "".join(part.replace("|", bar) if part[:1] == "`" else escaped(part) for part in re.split(r"(`[^`\n]+`)", text))


def code(text: str) -> str:
    """Return the text in a code span whose delimiter is longer than any run of backticks in the text."""
    ticks = "`" * (1 + _longest_run(text))
    return f"{ticks} {text} {ticks}" if text[:1] == "`" or text[-1:] == "`" else f"{ticks}{text}{ticks}"


# ------------------------------------------------------------------------------------------------ JSON


def as_json(page: Page) -> dict[str, Any]:
    """Return report.json: all text of the page and every plotted number in full. A number that is not finite is null."""
    return {"event": "report", "what": page.what, "title": page.title, "about": page.about, "verdict": page.verdict,
            "numbers": [{"value": number.value, "label": number.label, "note": number.note} for number in page.numbers],
            "cautions": list(page.cautions),
            "sections": [{"title": section.title, "blocks": [_block(block) for block in section.blocks]}
                         for section in page.sections],
            "made": page.made}


def _block(block: Block) -> dict[str, Any]:
    if isinstance(block, Figure):
        return {"figure": block.key, "title": block.title, "caption": block.caption,
                "tables": [_table(table) for table in block.tables]}
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Missing):
        return {"left_out": block.what, "because": block.because}
    if isinstance(block, Code):
        return {"code": block.words, "title": block.title}
    return {"text": block.words}


def _table(table: Table) -> dict[str, Any]:
    return {"table": table.title, "columns": list(table.columns),
            "rows": [[None if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
                     for row in table.rows]}
