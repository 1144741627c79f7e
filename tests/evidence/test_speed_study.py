"""The table of efficiencies: filled from a study, and every row of that study within what it expects."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from powertrain import planner
from powertrain.cost.estimate import TABLE
from powertrain.evidence.studies import load
from powertrain.recipe import Recipe
from powertrain.records import Facts
from powertrain.run.prepare import Prepared

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from efficiencies import fill_table, lies_within, speed_row, told_by, with_tables

STUDIES = Path(__file__).parent.parent.parent / "studies"
GUESSES = {"study": None, "rows": [
    {"device": device, "dtype": "any", "size": size, "low": 0.2, "high": 0.9, "basis": "guess: for the test"}
    for device in ("cpu", "cuda") for size in ("small", "large")]}


def row(dtype: str, size: str, reached: float, ideal_s: float = 0.1) -> dict[str, Any]:
    """A run that reached such a share of the ideal step."""
    return {"recipe": ["default"], "kind": "a kind", "device": "cpu", "dtype": dtype, "size": size, "tokens": 1000, "steps": 30,
            "floor_s": 0.01, "bound_by": "compute", "ideal_s": ideal_s, "expected_s": [0.1, 0.5], "basis": "guess",
            "measured_s": {"median": ideal_s / reached, "low": 0.0, "high": 1.0}}


SAMPLE = [row("fp32", "small", 0.5), row("fp32", "small", 0.6), row("bf16", "small", 0.3, ideal_s=0.04),
          row("fp32", "large", 0.8, ideal_s=2.0)]


def test_every_row_of_the_stored_study_lies_within_what_the_table_expects_of_it() -> None:
    table = json.loads(TABLE.read_text())
    if table["study"] is None:               # nothing measured yet: then all of it must say that it is guessed
        assert all(entry["basis"].startswith("guess: ") for entry in table["rows"])
        table, rows = fill_table(SAMPLE, GUESSES, "sample"), SAMPLE
    else:
        rows = load(STUDIES / table["study"]).findings["rows"]
        assert len(rows) >= 8
        assert fill_table(rows, table, table["study"]) == table, "the table was not written from the rows of its study"
    for found in rows:
        expected_s = told_by(found, table)
        assert expected_s is not None
        assert lies_within(found, expected_s), (found["recipe"], expected_s, found["measured_s"])


def test_an_entry_reaches_beyond_its_rows_and_further_where_they_are_few() -> None:
    entries = {(entry["dtype"], entry["size"]): entry for entry in fill_table(SAMPLE, GUESSES, "sample")["rows"]
               if entry["device"] == "cpu"}
    assert entries["fp32", "small"]["low"] == pytest.approx(0.5 / 1.2, abs=1e-3)
    assert entries["fp32", "small"]["high"] == pytest.approx(0.6 * 1.2, abs=1e-3)
    assert entries["bf16", "small"]["low"] == pytest.approx(0.3 / 1.3, abs=1e-3)
    assert entries["any", "small"]["low"] < 0.3 < 0.6 < entries["any", "small"]["high"]
    assert entries["fp32", "small"]["basis"] == "study: sample, 2 shapes of small fp32 products"
    assert entries["fp32", "large"]["basis"] == "study: sample, one shape of large fp32 products"


def test_what_the_study_did_not_measure_stays_a_guess() -> None:
    table = fill_table(SAMPLE, GUESSES, "sample")
    assert [entry for entry in table["rows"] if entry["device"] == "cuda"] == GUESSES["rows"][2:]  # type: ignore[index]
    assert fill_table(SAMPLE, table, "sample") == table


def test_a_row_is_also_told_by_the_others_alone() -> None:
    rows = with_tables(SAMPLE, GUESSES, "sample")
    assert rows[0]["before_s"] == [0.1, 0.5]
    assert lies_within(rows[0], rows[0]["expected_s"])
    assert rows[0]["from_others_s"] == pytest.approx([0.1 / (0.6 * 1.3), 0.1 * 1.3 / 0.6], rel=1e-3)
    assert rows[3]["from_others_s"] == pytest.approx([2.0 / 0.9, 2.0 / 0.2])      # no other of its kind: as guessed


def test_a_row_leaves_out_first_steps_and_what_this_machine_has_learned(facts: Facts) -> None:
    hardware = replace(facts.hardware, peak_flops_per_s={"fp32": 1e11, "bf16": 2e11}, bandwidth_bytes_per_s=1e10)
    known = replace(facts, hardware=hardware)
    plan = planner.make_plan(known, Recipe(), 50)
    prepared = Prepared(known, None, plan, 50)  # type: ignore[arg-type]
    found = speed_row(["default"], prepared, [[9.0, 9.0, *[0.2] * 10], [9.0, 9.0, *[0.3] * 11]])
    assert found["steps"] == 21
    assert found["measured_s"]["median"] == 0.3
    assert plan.estimate is not None
    assert found["expected_s"] == list(plan.estimate.step_s)
    assert found["floor_s"] <= found["ideal_s"]
