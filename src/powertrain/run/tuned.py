"""The cache of tuned plans: what `powertrain tune` found fastest here, for runs of the same model, data shape and software.

One small JSON file each, `tuned/<key>.json` in the cache folder. What is not there, or cannot be read, is not tuned.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain.facts.software import version_of
from powertrain.planner import Tuned
from powertrain.recipe import Recipe
from powertrain.records import DataFacts, Facts, to_plain
from powertrain.records.evidence import Interval
from powertrain.records.json_files import replace_file

FORMAT = 1
STEPS_PER_OCTAVE = 4         # lengths count as equal where they differ by less than about a sixth


def tuned_file(cache: Path, facts: Facts, recipe: Recipe) -> Path:
    return cache / "tuned" / f"{tuning_key(facts, recipe)}.json"


def tuning_key(facts: Facts, recipe: Recipe) -> str:
    """sha256 of what the fastest plan depends on: machine, software, model, the data's shape, method and the user's pins.

    Not the data itself, nor where the weights come from: another base of the same shape runs at the same speed.
    """
    parts = {"format": FORMAT, "machine": facts.hardware.fingerprint, "torch": facts.software.versions.get("torch"),
             "powertrain": version_of("powertrain"), "model": to_plain(replace(facts.model, path="")),
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
    """Written whole or not at all; it takes the place of an older one. Raises OSError where the cache cannot be written."""
    file = tuned_file(cache, facts, recipe)
    replace_file(file, json.dumps(to_plain(tuned), indent=2).encode() + b"\n")
    return file


def forget_tuned(cache: Path, facts: Facts, recipe: Recipe) -> None:
    """After a measurement that found nothing faster than the techniques' own answers."""
    tuned_file(cache, facts, recipe).unlink(missing_ok=True)


def _shape(data: DataFacts) -> Mapping[str, Any]:
    """What of the data decides speed: sizes, with lengths that vary from data to data taken roughly."""
    if data.kind == "blocks":
        return {"kind": data.kind, "block": data.block, "batch": data.train_batch_size}
    return {"kind": data.kind, "block": _roughly(data.block), "longest": _roughly(data.max_length),
            "batch": data.train_batch_size, "trained": round(data.trained_share, 1),
            "lengths": {key: _roughly(value) for key, value in sorted(data.length_quantiles.items())}}


def _roughly(length: int) -> int:
    return round(STEPS_PER_OCTAVE * math.log2(max(1, length)))
