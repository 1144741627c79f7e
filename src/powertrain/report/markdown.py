"""Markdown from templates: a page's headline, findings and tables (page.md.jinja), and an audit (audit.md.jinja)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from powertrain.report.page import Page, Table, is_number, said, shown

MOST_ROWS = 40               # of a table; report.json has all

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Return a template of this room, filled. Its values are not escaped: `escaped`, `prose` and `code` do that."""
    environment = Environment(loader=PackageLoader("powertrain", "report"), autoescape=False, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"escaped": escaped, "prose": prose, "code": code, **filters}
    return environment.get_template(template).render(values)


def write(page: Page) -> str:
    """Return the page as Markdown, for a README or a review. The pictures are in the HTML."""
    return render("page.md.jinja", {"alignments": _alignments, "shown": _shown, "fence": _fence,
                                    "kind": lambda block: type(block).__name__}, page=page, most_rows=MOST_ROWS)


def _shown(table: Table) -> list[list[str]]:
    return [[prose(said(cell), "\\|").replace("\n", "<br>") for cell in row] for row in shown(table, MOST_ROWS)]


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
    return _SPECIAL.sub(r"\\\1", " ".join(words.split("\n"))).replace("\\<", "&lt;").replace("\\>", "&gt;")


def prose(text: str, bar: str = "|") -> str:
    """Return the text escaped, except for code in backticks. `bar` replaces a | in code: a table needs `\\|`."""
    return "".join(part.replace("|", bar) if part[:1] == "`" else escaped(part) for part in re.split(r"(`[^`\n]+`)", text))


def code(text: str) -> str:
    """Return the text in a code span whose delimiter is longer than any run of backticks in the text."""
    ticks = "`" * (1 + _longest_run(text))
    return f"{ticks} {text} {ticks}" if text[:1] == "`" or text[-1:] == "`" else f"{ticks}{text}{ticks}"
