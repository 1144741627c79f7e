"""`powertrain bench`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.cli import output
from powertrain.cli.environment import budget_s, cache_folder, say

if TYPE_CHECKING:
    from powertrain.evidence.bench import Found, Suite
    from powertrain.evidence.notebook import Notebook
    from powertrain.records.evidence import Study
    from powertrain.run.prepare import Prepared

DEFAULT = "default"          # the embedded recipe
DONE = 0


def bench(words: Sequence[str], *, budget: str, study: str | None, as_json: bool) -> int:
    """The exit code: 1 where an assertion does not hold. What is only slow fails nothing."""
    from powertrain.evidence import bench as suites
    from powertrain.evidence import studies
    from powertrain.evidence.clock import Arena
    from powertrain.evidence.notebook import Notebook

    began, seconds = time.monotonic(), budget_s(budget)
    folder = studies.new_folder("bench", study)
    words, prepared = _prepared(words)
    suite = suites.make_suite(words, prepared)
    with Arena(cache_folder()) as arena:
        notebook = Notebook(arena, tuple(words), say, began + seconds)
        found = suites.bench(suite, notebook)
    made = _study(suite, notebook, found, folder, time.monotonic() - began)
    studies.save(folder, made, prepared.facts)
    _print(made, folder, as_json=as_json)
    return DONE if all(assertion.holds for assertion in found.assertions) else output.FAILED


def _prepared(words: Sequence[str]) -> tuple[tuple[str, ...], Prepared]:
    """The words as they are measured, and the recipe with its plan; a base that nobody has trained yet is trained."""
    from powertrain.cli.training import prepare_words
    from powertrain.evidence.bench import without_dropout

    named = tuple(words) or (DEFAULT,)
    prepared = prepare_words(named)
    changed = without_dropout(named, prepared)
    return changed, prepared if changed == named else prepare_words(changed)


def _study(suite: Suite, notebook: Notebook, found: Found, folder: Path, seconds: float) -> Study:
    from powertrain.evidence import studies
    from powertrain.evidence.bench import findings
    from powertrain.records.evidence import Study

    settings = [suite.base, *(setting for table in suite.tables.values() for setting in table)]
    arms = tuple(setting.arm for setting in settings)
    if found.control is not None:
        arms = (*arms, replace(suite.base.arm, name=notebook.comparisons[found.control].b))
    return Study(folder.name, "bench", f"the performance suite on the recipe {' '.join(suite.base.arm.words)}", arms=arms,
                 runs=tuple(notebook.runs), comparisons=tuple(notebook.comparisons), noise_floor=found.noise_floor,
                 findings=findings(suite, notebook, found), seconds=seconds, **studies.describe(suite.base.prepared.facts))


def _print(study: Study, folder: Path, *, as_json: bool) -> None:
    findings = study.findings
    if as_json:
        for name, table in findings["tables"].items():
            output.print_json({"event": "table", "table": name, **table})
        for assertion in findings["assertions"]:
            output.print_json({"event": "assertion", **assertion})
        output.print_json({"event": "study", "folder": str(folder), "noise_floor": study.noise_floor,
                           "notes": findings["notes"], "not_reached": findings["not_reached"], "seconds": study.seconds})
        return
    for name, table in findings["tables"].items():
        _print_table(name, table)
    output.print_rows([("holds" if assertion["holds"] else "FAILS", assertion["what"], assertion["because"])
                       for assertion in findings["assertions"]])
    output.print_rows(_remarks(study, folder))


def _print_table(name: str, table: Mapping[str, Any]) -> None:
    if table["rows"]:
        output.print_rows([(name, *table["columns"]), *(("", *map(_shown, row)) for row in table["rows"])])
        print()


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1e5 else f"{cell:.5g}"
    return "" if cell is None else str(cell)


def _remarks(study: Study, folder: Path) -> list[tuple[str, str]]:
    findings = study.findings
    floor = "not measured: speeds are held against a margin of 2 %" if study.noise_floor is None else \
        f"equal arms differ by up to {study.noise_floor:.1%} here"
    rows = [*(("Note", note) for note in findings["notes"]), ("Noise", floor)]
    if findings["not_reached"]:
        left = findings["not_reached"]
        rows.append(("Left", f"not reached within the budget: {'; '.join(left)}; a larger --budget does"))
    return [*rows, ("Study", f"{folder}/")]
