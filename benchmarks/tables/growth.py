"""docs/results.md: how time and memory grow, from the newest study of `make bench CASES=growth`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.report.words import count, duration, memory
from tables.stored import folder_of, markdown_table, studies_of, times

COLUMNS = ("along", "at", "speed", "of the GEMM limit", "held at most", "time")
SECONDS = {"start_s": "{} to the first step, warm", "first_s": "{} the first time", "step_s": "{} a step",
           "again_s": "{} again"}


def rows(studies: Path) -> str:
    """Return a row for each place on each axis."""
    newest = studies_of("growth", studies)[-1:]
    found = [_row(axis, one) for study in newest for axis, places in study["findings"]["axes"].items() for one in places]
    return markdown_table(COLUMNS, found) + "".join(f"\n{folder_of(study)}\n" for study in newest)


def _row(axis: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    speed = f"{times(found['tokens_per_s'], ',.0f')} tokens/s" if "tokens_per_s" in found else \
        f"{found['rows_per_s']:,.0f} rows/s" if "rows_per_s" in found else found.get("refused", "")
    share = f"{found['share_of_products']:.0%}" if "share_of_products" in found else ""
    held = found.get("resident_bytes", found.get("allocated_bytes"))
    spent = [said.format(duration(found[name])) for name, said in SECONDS.items() if name in found]
    return axis, count(found["at"]), speed, share, "" if held is None else memory(held), ", ".join(spent)
