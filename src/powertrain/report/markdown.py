"""A page as Markdown: headline, findings and tables, for a README or a review. The pictures are in the HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator

from powertrain.report.page import Block, Code, Figure, Missing, Page, Table, is_number, said

MOST_ROWS = 40               # of a table; report.json has all

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def write(page: Page) -> str:
    return "\n".join(_lines(page)) + "\n"


def _lines(page: Page) -> Iterator[str]:
    yield from (f"# {escaped(page.title)}", "", *([escaped(page.about), ""] if page.about else []),
                f"**{escaped(page.verdict)}**", "")
    yield from (f"- {escaped(number.label)}: **{escaped(number.value)}** ({escaped(number.note)})" if number.note else
                f"- {escaped(number.label)}: **{escaped(number.value)}**" for number in page.numbers)
    if page.cautions:
        yield from ("", "Read with care:", "")
        yield from (f"- {prose(caution)}" for caution in page.cautions)
    for section in page.sections:
        yield from ("", f"## {escaped(section.title)}")
        for block in section.blocks:
            yield ""
            yield from _block(block)
    yield from ("", escaped(page.made))


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Figure):
        yield from (f"### {escaped(block.title)}", "", prose(block.caption))
        for table in block.tables:
            yield ""
            yield from _table(table)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Missing):
        yield f"*Left out: {escaped(block.what)}. {prose(block.because)}*"
    elif isinstance(block, Code):
        if block.title:
            yield from (escaped(block.title), "")
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block.words)), default=0))
        yield from (fence, block.words, fence)
    else:
        yield prose(block.words)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"*{prose(table.title)}*", "")
    yield "| " + " | ".join(escaped(column) for column in table.columns) + " |"
    yield "|" + "|".join("---:" if _is_numeric(table, i) else "---" for i in range(len(table.columns))) + "|"
    for row in shown(table, MOST_ROWS):
        yield "| " + " | ".join(prose(said(cell), "\\|").replace("\n", "<br>") for cell in row) + " |"
    if len(table.rows) > MOST_ROWS:
        yield from ("", f"{MOST_ROWS} of {len(table.rows):,} rows, evenly spread; report.json has all.")


def shown(table: Table, most: int) -> list[tuple[str | int | float | None, ...]]:
    """The rows, or so many of them, evenly spread, the first and the last among them."""
    rows = table.rows
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _is_numeric(table: Table, column: int) -> bool:
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(is_number(cell) for cell in cells)


def escaped(words: str) -> str:
    """Text that means nothing to Markdown or HTML, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(words.split("\n"))).replace("\\<", "&lt;").replace("\\>", "&gt;")


def prose(text: str, bar: str = "|") -> str:
    """Return the text escaped, except for code in backticks. `bar` replaces a | in code: a table needs `\\|`."""
    return "".join(part.replace("|", bar) if part[:1] == "`" else escaped(part) for part in re.split(r"(`[^`\n]+`)", text))
