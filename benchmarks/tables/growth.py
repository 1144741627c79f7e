"""docs/results.md: how time and memory grow, along each axis from the newest study that has it, as its report shows it."""

from __future__ import annotations

from pathlib import Path

from powertrain.report.page import Table
from powertrain.report.study_commands import growth
from tables.stored import folder_of, markdown_table, studies_of


def rows(studies: Path) -> str:
    """Return a table for each axis."""
    tables, shown = dict[str, Table](), dict[str, None]()
    for study in reversed(studies_of("growth", studies)):
        of_study = {section.title: block for section in growth(study).sections for block in section.blocks
                    if isinstance(block, Table)}
        if of_study.keys() - tables.keys():
            shown[folder_of(study)] = None
        tables = of_study | tables
    made = [markdown_table(table.columns, [["" if cell is None else str(cell) for cell in row] for row in table.rows])
            for table in tables.values()]
    return "\n".join([*made, ", ".join(shown) + "\n"])
