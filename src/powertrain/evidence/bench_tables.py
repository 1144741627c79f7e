"""What a bench comes to, as a study holds it: tables of plain numbers and words, and the assertions."""

from __future__ import annotations

import statistics
from typing import Any

from powertrain.evidence.assertions import MIB, Tried
from powertrain.evidence.bench import TABLES, Found, Suite
from powertrain.evidence.notebook import Notebook
from powertrain.evidence.stats import interval
from powertrain.records import to_plain
from powertrain.records.evidence import NOT_HERE, ArmRun

LEADING = {"micro-batch": "examples", "loader": "workers", "precision": "precision", "accumulation": "passes"}
LOADING = ("batches/s", "times as many", "waiting for data %")
COLUMNS = ("peak MiB", "predicted MiB", "prediction off by %", "loss apart", "tokens/s", "times as fast", "from", "to",
           "verdict", "why")


def findings(suite: Suite, notebook: Notebook, found: Found) -> dict[str, Any]:
    """Of a Study of kind `bench`: tables of numbers and words, units in the columns; and the assertions."""
    return {"recipe": list(suite.base.arm.words), "tables": {table: _table(table, suite, notebook, found) for table in TABLES},
            "assertions": [to_plain(assertion) for assertion in found.assertions], "control": found.control,
            "notes": [*suite.notes, *_about_memory(suite, found)], "not_reached": list(found.not_reached)}


def _about_memory(suite: Suite, found: Found) -> list[str]:
    """Why the memory of nothing is asserted, where it is not."""
    ran = [tried for table in found.tried.values() for tried in table if tried.error is None]
    model, device = suite.base.prepared.facts.model, suite.base.prepared.facts.hardware.device
    notes = []
    if ran and all(tried.measured_bytes is None for tried in ran):
        notes.append(f"memory is not counted on {device}, so nothing is asserted of it")
    if ran and all(tried.predicted_bytes is None for tried in ran):
        notes.append(f"{model.provider} computes the model, whose memory is not predicted, so its prediction is not asserted")
    return notes


def _table(table: str, suite: Suite, notebook: Notebook, found: Found) -> dict[str, Any]:
    """Rows that are held against the first one; what cannot be tried here comes last, with its reason."""
    more = LOADING if table == "loader" else ()
    settings = {setting.arm.name: number for number, setting in enumerate(suite.tables[table])}
    rows = [[tried.amount, *_loading(settings[tried.name], tried, notebook, found)[:len(more)],
             *_cells(tried, number == 0, notebook, found)] for number, tried in enumerate(found.tried[table])]
    empty = [None] * (len(more) + len(COLUMNS) - 2)
    rows += [[name, *empty, NOT_HERE, why] for name, why in suite.not_here[table].items()]
    return {"columns": [LEADING[table], *more, *COLUMNS], "rows": rows}


def _cells(tried: Tried, is_first: bool, notebook: Notebook, found: Found) -> list[Any]:
    """What stands in COLUMNS."""
    share, parity, run = tried.error_share, found.parities.get(tried.name), run_of(tried.name, notebook)
    measured = None if tried.measured_bytes is None else round(tried.measured_bytes / MIB, 2)
    predicted = None if tried.predicted_bytes is None else round(tried.predicted_bytes / MIB, 2)
    head = [measured, predicted, None if share is None else round(100 * share, 2), None if parity is None else
            parity.loss_difference, None if run is None else round(statistics.median(w.tokens_per_s for w in run.windows), 1)]
    index = found.compared.get(tried.name)
    if index is None:
        why = tried.error or found.failed.get(tried.name) or ("what the others are held against" if is_first else
                                                              "not timed within the budget")
        return [*head, None, None, None, None, why]
    comparison = notebook.comparisons[index]
    speed = [None] * 3 if comparison.speed is None else [round(value, 4) for value in (
        comparison.speed.median, comparison.speed.low, comparison.speed.high)]
    return [*head, *speed, comparison.verdict, comparison.because]


def run_of(name: str, notebook: Notebook) -> ArmRun | None:
    """The last run of an arm that has windows."""
    return next((run for run in reversed(notebook.runs) if run.arm == name and run.windows), None)


def _loading(place: int, tried: Tried, notebook: Notebook, found: Found) -> list[Any]:
    """Batches a second, how many times those without workers, and the share of a step that waits for data."""
    rates = [rates[place] for rates in found.rates]
    run = run_of(tried.name, notebook)
    waits = None if run is None else sum(window.parts.get("data", 0.0) for window in run.windows) / sum(
        window.seconds for window in run.windows)
    times = interval([rates[place] / rates[0] for rates in found.rates]).median if rates else None
    return [round(statistics.median(rates), 1) if rates else None, None if times is None else round(times, 3),
            None if waits is None else round(100 * waits, 2)]
