"""The share of the ideal speed that runs reach, as a table that plans read: filled from a study, never by hand.

A row of the study is one shape of run, measured in fresh processes; benchmarks/speeds.py makes them. The table has one
entry for each kind of device, dtype of the products and size of the work, as wide as the rows in it are apart, and wider
the fewer they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from powertrain import planner
from powertrain.cost.estimate import estimate, ideal_step_s, kind_of_work, size_class, workload_work
from powertrain.evidence.stats import interval
from powertrain.records import to_plain
from powertrain.run.learned import LEFT_OUT
from powertrain.run.prepare import Prepared

Row = Mapping[str, Any]
MARGIN, LONE_MARGIN = 0.1, 0.2               # beyond the rows to either side, and more: divided by their number


def speed_row(words: Sequence[str], prepared: Prepared, runs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the predicted and the measured seconds of a run's steps; `runs` has one sequence for each process.

    Raises UnknownFact where the machine's speed is not measured.
    """
    hardware = replace(prepared.facts.hardware, speeds={})
    model, workload = prepared.facts.model, planner.workload_of(prepared.facts, prepared.plan)
    work = workload_work(model, workload)
    told = estimate(model, workload, hardware, 1)
    steady = [second for run in runs for second in run[max(LEFT_OUT[0], round(LEFT_OUT[1] * len(run))):]]
    return {"recipe": list(words), "kind": kind_of_work(model, workload), "device": hardware.device, "dtype": work.dtype,
            "size": size_class(workload.pass_slots, model.width), "tokens": work.tokens, "steps": len(steady),
            "floor_s": told.floor_s, "bound_by": told.bound_by, "ideal_s": ideal_step_s(work, hardware),
            "expected_s": list(told.step_s), "basis": told.basis, "measured_s": to_plain(interval(steady))}


def fill_table(rows: Sequence[Row], before: Mapping[str, Any], study: str) -> dict[str, Any]:
    """Return efficiencies.json with the study's rows in it; its rows of other kinds of devices stay.

    The entry for dtype "any" is for those that the study did not measure.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        for dtype in (row["dtype"], "any"):
            groups.setdefault((row["device"], dtype, row["size"]), []).append(row)
    entries = {(entry["device"], entry["dtype"], entry["size"]): entry for entry in before["rows"]}
    for key, members in groups.items():
        low, high = _spread(members)
        device, dtype, size = key
        what = "one shape" if len(members) == 1 else f"{len(members)} shapes"
        entries[key] = {"device": device, "dtype": dtype, "size": size, "low": round(low, 3), "high": round(high, 3),
                        "basis": f"study: {study}, {what} of {size} {'products' if dtype == 'any' else f'{dtype} products'}"}
    return {"study": study, "rows": list(entries.values())}


def told_by(row: Row, table: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the seconds of a step, low and high, that a table predicts of the row's work; None where it has no entry."""
    found = {(entry["device"], entry["dtype"], entry["size"]): entry for entry in table["rows"]}
    entry = found.get((row["device"], row["dtype"], row["size"])) or found.get((row["device"], "any", row["size"]))
    if entry is None:
        return None
    return max(row["ideal_s"] / entry["high"], row["floor_s"]), max(row["ideal_s"] / entry["low"], row["floor_s"])


def with_tables(rows: Sequence[Row], before: Mapping[str, Any], study: str) -> list[dict[str, Any]]:
    """Return the rows, each with the prediction of the filled table and of a table filled from the other rows alone."""
    table = fill_table(rows, before, study)
    found = []
    for place, row in enumerate(rows):
        others = fill_table([*rows[:place], *rows[place + 1:]], before, study)
        found.append({**row, "before_s": row["expected_s"], "expected_s": _listed(told_by(row, table)),
                      "from_others_s": _listed(told_by(row, others))})
    return found


def lies_within(row: Row, expected_s: Sequence[float]) -> bool:
    return bool(expected_s[0] <= row["measured_s"]["median"] <= expected_s[1])


def _spread(rows: Sequence[Row]) -> tuple[float, float]:
    margin = MARGIN + LONE_MARGIN / len(rows)
    reached = [row["ideal_s"] / row["measured_s"]["median"] for row in rows]
    return min(reached) / (1 + margin), max(reached) * (1 + margin)


def _listed(pair: tuple[float, float] | None) -> list[float] | None:
    return None if pair is None else list(pair)
