"""docs/results.md: how time and memory grow, from the newest study of `make bench CASES=growth`, as its report has it."""

from __future__ import annotations

from pathlib import Path

from powertrain.report.page import Table
from powertrain.report.study_commands import growth
from tables.stored import folder_of, markdown_table, studies_of


def rows(studies: Path) -> str:
    """Return a table for each axis."""
    newest = studies_of("growth", studies)[-1:]
    tables = [block for study in newest for section in growth(study).sections for block in section.blocks
              if isinstance(block, Table)]
    made = [markdown_table(table.columns, [["" if cell is None else str(cell) for cell in row] for row in table.rows])
            for table in tables]
    return "\n".join([*made, *(f"{folder_of(study)}\n" for study in newest)])
