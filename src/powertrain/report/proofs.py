"""What `powertrain ablate`, `tune` and `bench` print of a study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.records.evidence import Study
from powertrain.report.figures import duration, memory
from powertrain.report.page import pins_in_words, said

Row = tuple[str, ...]


def technique_rows(study: Study) -> Iterator[Row]:
    """Yield what an ablation found of each technique."""
    yield "technique", "bound", "speed with it", "memory", "same losses", "verdict", "why"
    for found in study.findings["techniques"]:
        change, parity = found["memory_bytes"], found["parity"]
        yield (found["name"], "none" if found["bound"] is None else f"x {found['bound']:.2f}",
               "not timed" if found["speed"] is None else _speed(found["speed"]),
               "unknown" if change is None else f"{'+' if change > 0 else '-'}{memory(abs(change))}" if change else "the same",
               "not looked at" if parity is None else f"{'yes' if parity['holds'] else 'NO'} ({parity['demanded'].lower()})",
               found["verdict"], found["why"])


def candidate_rows(candidates: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield what a tuning found of each plan that it tried."""
    yield "plan", "speed over the untuned one, by rounds", "kept", "why"
    for found in candidates:
        yield (found["name"], "; ".join(map(_speed, found["rounds"])) or "not tried", "yes" if found["kept"] else "no",
               found["why"])


def tuned_rows(pins: Mapping[str, Any], because: str, least_steps: Mapping[str, int], cached: str) -> list[Row]:
    """Return what a tuning chose, and what later runs do with it."""
    return [("Tuned", pins_in_words(pins) or "nothing"), ("Because", because),
            *[("Length", f"{name} is used for runs of {steps:,} steps or more, which earn back what it takes to start")
              for name, steps in least_steps.items()],
            ("Kept", cached)]


def total_rows(study: Study, folder: Path) -> list[Row]:
    total, floor = study.findings.get("total"), study.noise_floor
    rows = [("Noise", f"equal plans differ by up to {floor:.1%} here")] if floor is not None else []
    if total is not None and study.kind == "ablation":
        rows.append(("Total", f"the full plan against no technique: {study.comparisons[total].because}"))
    return [*rows, ("Took", duration(study.seconds)), ("Study", f"{folder}/")]


def bench_tables(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[list[Row]]:
    """Yield the rows of each table that has any."""
    for name, table in tables.items():
        if table["rows"]:
            rows = [tuple("" if cell is None else said(cell) if isinstance(cell, float) else str(cell) for cell in row)
                    for row in table["rows"]]
            yield [(name, *table["columns"]), *(("", *row) for row in rows)]


def bench_rows(study: Study, folder: Path) -> list[Row]:
    """Return the remarks on a bench: notes, noise, and what was not reached."""
    floor = "not measured: speeds are held against a margin of 2 %" if study.noise_floor is None else \
        f"equal arms differ by up to {study.noise_floor:.1%} here"
    left = study.findings["not_reached"]
    return [*(("Note", note) for note in study.findings["notes"]), ("Noise", floor),
            *([("Left", f"not reached within the budget: {'; '.join(left)}; a larger --budget does")] if left else []),
            ("Study", f"{folder}/")]


def _speed(found: Mapping[str, float]) -> str:
    return f"x {found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
