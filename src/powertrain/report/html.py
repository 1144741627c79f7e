"""A page as one HTML file: nothing is loaded, no script runs, light or dark as the reader's system is."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from powertrain.report import svg_plot, svg_rows
from powertrain.report.chart import Drawing, Plot
from powertrain.report.markdown import shown
from powertrain.report.page import Block, Cell, Code, Figure, Missing, Page, Section, Table, is_number, said, several
from powertrain.report.style import STYLE

WIDE_PX, BESIDE_PX, NARROW_PX = 860.0, 416.0, 344.0
MOST_ROWS = 200              # of a data table on the page; report.json has all
LONG_CELL, SHORT_CELL = 48, 18               # characters
LONG_TABLE = 60              # rows; longer ones are folded
COMMAND = re.compile("`([^`]+)`")
# nothing may be fetched or run, whatever text came into the page
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write(page: Page) -> str:
    return "\n".join((
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">', '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(page.title)}</title>", f"<style>{STYLE}</style>", "</head>", "<body>",
        "<header>", f'<p class="kind">Powertrain · {_text(page.what)}</p>', f"<h1>{_text(page.title)}</h1>",
        *([f'<p class="about">{_text(page.about)}</p>'] if page.about else []),
        f'<p class="verdict {page.tone}">{_prose(page.verdict)}</p>', *_numbers(page), *_cautions(page), "</header>",
        *_contents(page), "<main>",
        *(line for number, section in enumerate(page.sections) for line in _section(number, section)),
        "</main>", f"<footer><p>{_text(page.made)}</p></footer>", "</body>", "</html>", ""))


def _text(words: str) -> str:
    return html.escape(words)


def _prose(words: str) -> str:
    """Text in which a command stands between backticks."""
    return COMMAND.sub(r"<code>\1</code>", _text(words))


def _numbers(page: Page) -> Iterator[str]:
    if page.numbers:
        yield '<ul class="numbers">'
        yield from (f"<li><b>{_text(number.value)}</b><span>{_text(number.label)}</span>"
                    f"<small>{_text(number.note)}</small></li>" for number in page.numbers)
        yield "</ul>"


def _cautions(page: Page) -> Iterator[str]:
    if page.cautions:
        yield '<section class="cautions" aria-label="Read with care"><h2>Read with care</h2><ul>'
        yield from (f"<li>{_prose(caution)}</li>" for caution in page.cautions)
        yield "</ul></section>"


def _contents(page: Page) -> Iterator[str]:
    yield '<nav aria-label="Contents"><ul>'
    yield from (f'<li><a href="#s{number}">{_text(section.title)}</a></li>' for number, section in enumerate(page.sections))
    yield "</ul></nav>"


def _section(number: int, section: Section) -> Iterator[str]:
    yield f'<section id="s{number}"><h2>{_text(section.title)}</h2>'
    for block in section.blocks:
        yield from _block(block)
    yield "</section>"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Figure):
        yield from _figure(block)
    elif isinstance(block, Table):
        yield from _table(block) if len(block.rows) <= LONG_TABLE else _folded(block, block.title or "Table")
    elif isinstance(block, Missing):
        yield f'<p class="missing">Left out: {_text(block.what)}. {_prose(block.because)}</p>'
    elif isinstance(block, Code):
        title = f'<p class="codetitle">{_text(block.title)}</p>' if block.title else ""
        yield f'{title}<pre tabindex="0">{_text(block.words)}</pre>'
    else:
        yield f"<p>{_prose(block.words)}</p>"


def _figure(figure: Figure) -> Iterator[str]:
    yield f'<figure id="{_text(figure.key)}"><h3>{_text(figure.title)}</h3>'
    if figure.beside:
        yield '<div class="beside">'
        yield from (_draw(drawing, BESIDE_PX, f"{figure.key}-{i}", figure) for i, drawing in enumerate(figure.drawings))
        yield "</div>"
    else:
        for form, width in (("wide", WIDE_PX), ("narrow", NARROW_PX)):
            yield f'<div class="{form}">'
            yield from (_draw(drawing, width, f"{figure.key}-{form}-{i}", figure)
                        for i, drawing in enumerate(figure.drawings))
            yield "</div>"
    yield f"<figcaption>{_prose(figure.caption)}</figcaption>"
    for table in figure.tables:
        yield from _folded(table, f"Numbers: {table.title}" if table.title else "The numbers")
    yield "</figure>"


def _draw(drawing: Drawing, width: float, name: str, figure: Figure) -> str:
    title = f"{figure.title}: {drawing.title}" if drawing.title else figure.title
    if isinstance(drawing, Plot):
        return svg_plot.draw(drawing, width, name=name, title=title, description=figure.description)
    return svg_rows.draw(drawing, width, name=name, title=title, description=figure.description)


def _folded(table: Table, title: str) -> Iterator[str]:
    yield f"<details><summary>{_text(title)} ({several(len(table.rows), 'row')})</summary>"
    yield from _table(table, titled=False)
    yield "</details>"


def _table(table: Table, *, titled: bool = True) -> Iterator[str]:
    yield '<div class="scroll" tabindex="0"><table>'
    if titled and table.title:
        yield f"<caption>{_prose(table.title)}</caption>"
    if any(table.columns):
        yield "<thead><tr>" + "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns) + "</tr></thead>"
    yield "<tbody>"
    kinds = [_kind(column) for column in zip(*table.rows, strict=True)]
    yield from ("<tr>" + "".join(map(_cell, row, kinds)) + "</tr>" for row in shown(table, MOST_ROWS))
    yield "</tbody></table></div>"
    if len(table.rows) > MOST_ROWS:
        yield f'<p class="missing">{MOST_ROWS} of {len(table.rows):,} rows, evenly spread; report.json has all.</p>'


def _kind(column: Sequence[Cell]) -> str:
    """The class of a column's cells: numbers stand right, long words get some width, names are not broken."""
    if any(map(is_number, column)) and not any(isinstance(cell, str) for cell in column):
        return "number"
    longest = max((len(said(cell)) for cell in column), default=0)
    return "says" if longest > LONG_CELL else "short" if longest <= SHORT_CELL else ""


def _cell(cell: Cell, kind: str) -> str:
    words = _prose(said(cell))
    if isinstance(cell, str) and cell in VERDICT_TONES:
        words = f'<span class="word {VERDICT_TONES[cell]}">{words}</span>'
    return f'<td class="{kind}">{words}</td>' if kind else f"<td>{words}</td>"


# the words of verdicts, which get a colour beside them; the word says it without the colour
VERDICT_TONES = {
    "faster": "good", "confirmed": "good", "better": "good", "holds": "good", "inside": "good", "on": "good",
    "harmful": "bad", "invalid": "bad", "does not hold": "bad", "failed": "bad",
    "smaller than claimed": "open", "no effect": "open", "inconclusive": "open",
    "not applicable here": "quiet", "off": "quiet"}
