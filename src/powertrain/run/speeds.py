"""What finished runs reached on this machine, kept so that later plans of the same kind of work expect that.

One line of JSON a run, only ever appended, in `speeds/<fingerprint>.jsonl` in the cache folder. A line that cannot be
read is passed over, and a cache that cannot be written loses the line: neither stops a run.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain import planner
from powertrain.cost.estimate import kind_of_work, workload_work
from powertrain.cost.roofline import ideal_step_s, step_floor
from powertrain.records import Facts, Hardware, Plan, Reached, UnknownFact

LEFT_OUT = (2, 0.1)          # of a run: the first steps, at least so many and so large a share, which are slower
LEAST_STEPS = 10             # that a run is measured over
NEWEST = 20                  # runs of a kind that count: a machine changes
QUANTILES = (0.1, 0.5, 0.9)


def speeds_file(cache: Path, fingerprint: str) -> Path:
    return cache / "speeds" / f"{fingerprint}.jsonl"


def keep_speed(cache: Path, facts: Facts, plan: Plan, step_s: Sequence[float]) -> bool:
    """Append what a finished run of `plan` took a step; False where it says nothing or cannot be kept."""
    line = speed_line(facts, plan, step_s)
    file = speeds_file(cache, facts.hardware.fingerprint)
    if line is None or not facts.hardware.fingerprint:
        return False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    except OSError:
        return False
    return True


def speed_line(facts: Facts, plan: Plan, step_s: Sequence[float]) -> dict[str, Any] | None:
    """Kind of work, floor, ideal and what was measured: quantiles of the steps' seconds. None where too little is known."""
    timed = sorted(step_s[max(LEFT_OUT[0], round(LEFT_OUT[1] * len(step_s))):])
    if len(timed) < LEAST_STEPS:
        return None
    workload = planner.workload_of(facts, plan)
    try:
        work = workload_work(facts.model, workload)
        ideal_s, (floor_s, _) = ideal_step_s(work, facts.hardware), step_floor(work, facts.hardware)
    except UnknownFact:
        return None
    fast, median, slow = (timed[round(share * (len(timed) - 1))] for share in QUANTILES)
    return {"kind": kind_of_work(facts.model, workload), "date": datetime.date.today().isoformat(), "steps": len(timed),
            "tokens": work.tokens, "floor_s": floor_s, "ideal_s": ideal_s,
            "step_s": {"p10": fast, "median": median, "p90": slow}}


def with_speeds(hardware: Hardware, cache: Path) -> Hardware:
    """The machine with what its own runs reached."""
    return replace(hardware, speeds=read_speeds(speeds_file(cache, hardware.fingerprint)))


def read_speeds(file: Path) -> Mapping[str, Reached]:
    """Kind of work -> what its newest runs reached of the ideal step: the spread of all, the middle of their medians."""
    runs: dict[str, list[tuple[float, float, float]]] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    for line in lines:
        if (found := _reached(line)) is not None:
            runs.setdefault(found[0], []).append(found[1])
    return {kind: _spread(shares[-NEWEST:]) for kind, shares in runs.items()}


def _reached(line: str) -> tuple[str, tuple[float, float, float]] | None:
    """(kind, lowest, middle and highest share of the ideal speed) of one line."""
    try:
        read = json.loads(line)
        ideal_s, seconds = float(read["ideal_s"]), read["step_s"]
        shares = (ideal_s / seconds["p90"], ideal_s / seconds["median"], ideal_s / seconds["p10"])
        kind = str(read["kind"])
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    return (kind, shares) if all(math.isfinite(share) and share > 0 for share in shares) else None


def _spread(shares: Sequence[tuple[float, float, float]]) -> Reached:
    medians = sorted(median for _, median, _ in shares)
    low, high = min(low for low, _, _ in shares), max(high for _, _, high in shares)
    return Reached(low, medians[len(medians) // 2], high, len(shares))
