"""What runs have taught this machine: the speeds of finished runs, and the plans that `powertrain tune` found fastest.

Both lie in the cache folder, speeds as one line of JSON a run in `speeds/<fingerprint>.jsonl`, a tuned plan as a file
`tuned/<key>.json`. What cannot be read is passed over, and a speed that cannot be written is lost: neither stops a run.
"""

import datetime
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain import planner
from powertrain.cost.estimate import ideal_step_s, kind_of_work, step_floor, workload_work
from powertrain.facts.software import version_of
from powertrain.planner import Tuned
from powertrain.recipe import Recipe
from powertrain.records import DataFacts, Facts, Hardware, Plan, Reached, UnknownFact, to_plain
from powertrain.records.evidence import Interval
from powertrain.records.json_files import write_json

LEFT_OUT = (2, 0.1)          # of a run: the first steps, at least so many and so large a share, which are slower
LEAST_STEPS = 10             # that a run is measured over
NEWEST = 20                  # runs of a kind that count: a machine changes
QUANTILES = (0.1, 0.5, 0.9)
FORMAT = 1                   # of a tuned plan's key
STEPS_PER_OCTAVE = 4         # lengths count as equal where they differ by less than about a sixth

# ------------------------------------------------------------------------------------------------ speeds


def speeds_file(cache: Path, fingerprint: str) -> Path:
    return cache / "speeds" / f"{fingerprint}.jsonl"


def keep_speed(cache: Path, facts: Facts, plan: Plan, step_s: Sequence[float]) -> bool:
    """Append the step times of a finished run of `plan`; return False where they say nothing or cannot be kept."""
    line = speed_line(facts, plan, step_s)
    if line is None or not facts.hardware.fingerprint:
        return False
    file = speeds_file(cache, facts.hardware.fingerprint)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
    except OSError:
        return False
    return True


def speed_line(facts: Facts, plan: Plan, step_s: Sequence[float]) -> dict[str, Any] | None:
    """Return the kind of work, its floor and ideal, and quantiles of the step times; None where too little is known."""
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
    """Return the machine with the speeds that its own runs reached."""
    return replace(hardware, speeds=read_speeds(speeds_file(cache, hardware.fingerprint)))


def read_speeds(file: Path) -> Mapping[str, Reached]:
    """Return, for each kind of work, the shares of the ideal speed that its newest runs reached."""
    runs: dict[str, list[tuple[float, float, float]]] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    for kind, shares in filter(None, map(_reached, lines)):
        runs.setdefault(kind, []).append(shares)
    return {kind: _spread(shares[-NEWEST:]) for kind, shares in runs.items()}


def _reached(line: str) -> tuple[str, tuple[float, float, float]] | None:
    """Return (kind, lowest, middle and highest share of the ideal speed) of one line; None for a broken one."""
    try:
        read = json.loads(line)
        ideal_s, seconds = float(read["ideal_s"]), read["step_s"]
        shares = (ideal_s / seconds["p90"], ideal_s / seconds["median"], ideal_s / seconds["p10"])
        kind = str(read["kind"])
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    return (kind, shares) if all(math.isfinite(share) and share > 0 for share in shares) else None


def _spread(shares: Sequence[tuple[float, float, float]]) -> Reached:
    """Return the spread of all runs, with the middle of their medians."""
    lows, medians, highs = zip(*shares, strict=True)
    return Reached(min(lows), sorted(medians)[len(medians) // 2], max(highs), len(shares))


# ------------------------------------------------------------------------------------------------ tuned plans


def tuned_file(cache: Path, facts: Facts, recipe: Recipe) -> Path:
    return cache / "tuned" / f"{tuning_key(facts, recipe)}.json"


def tuning_key(facts: Facts, recipe: Recipe) -> str:
    """Return a sha256 of all that the fastest plan depends on.

    These are machine, software, model, the data's shape, method and the user's pins. The data itself does not count, nor the
    weights: another base of the same shape runs at the same speed.
    """
    parts = {"format": FORMAT, "machine": facts.hardware.fingerprint, "torch": facts.software.versions.get("torch"),
             "powertrain": version_of("powertrain"), "model": to_plain(replace(facts.model, path="", digest="")),
             "data": _shape(facts.data), "method": recipe.method, "pins": recipe.techniques,
             "adapters": recipe.lora.model_dump() if facts.model.adapter_parameters else None,
             "quantisation": recipe.quantisation.model_dump() if recipe.method == "qlora" else None}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def read_tuned(cache: Path, facts: Facts, recipe: Recipe) -> Tuned | None:
    try:
        kept = json.loads(tuned_file(cache, facts, recipe).read_text(encoding="utf-8"))
        return Tuned(pins=dict(kept["pins"]), speed=Interval(**kept["speed"]), date=str(kept["date"]),
                     study=str(kept["study"]), least_steps={name: int(n) for name, n in kept["least_steps"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_tuned(cache: Path, facts: Facts, recipe: Recipe, tuned: Tuned) -> Path:
    """Write a tuned plan, in the place of an older one. Raises OSError where the cache cannot be written."""
    file = tuned_file(cache, facts, recipe)
    write_json(file, to_plain(tuned))
    return file


def forget_tuned(cache: Path, facts: Facts, recipe: Recipe) -> None:
    """Remove the tuned plan, after a measurement that found nothing faster than the techniques' own answers."""
    tuned_file(cache, facts, recipe).unlink(missing_ok=True)


def _shape(data: DataFacts) -> Mapping[str, Any]:
    """Return the sizes of the data that decide speed, with lengths that vary from data to data taken roughly."""
    if data.kind == "blocks":
        return {"kind": data.kind, "block": data.block, "batch": data.train_batch_size}
    return {"kind": data.kind, "block": _roughly(data.block), "longest": _roughly(data.max_length),
            "batch": data.train_batch_size, "trained": round(data.trained_share, 1),
            "lengths": {key: _roughly(value) for key, value in sorted(data.length_quantiles.items())}}


def _roughly(length: int) -> int:
    return round(STEPS_PER_OCTAVE * math.log2(max(1, length)))
