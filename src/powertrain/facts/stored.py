"""Facts as a run's facts.json holds them, read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.records import DataFacts, Facts, Hardware, ModelFacts, OptimizerFacts, Reached, Software, UnknownFact


def facts_from_json(data: Mapping[str, Any]) -> Facts:
    """Raises UnknownFact where another version wrote them, with other fields."""
    try:
        hardware, model = dict(data["hardware"]), dict(data["model"])
        capability = hardware.get("compute_capability")
        hardware |= {"instructions": tuple(hardware.get("instructions") or ()),
                     "compute_capability": tuple(capability) if capability else None,
                     "speeds": {kind: Reached(**seen) for kind, seen in (hardware.get("speeds") or {}).items()}}
        model |= {"adapted_layers": tuple(model.get("adapted_layers") or ()),
                  "shapes": {name: tuple(shape) for name, shape in (model.get("shapes") or {}).items()}}
        return Facts(Hardware(**hardware), Software(**data["software"]), ModelFacts(**model), DataFacts(**data["data"]),
                     OptimizerFacts(**data.get("optimizer", {})))      # older runs have AdamW
    except (KeyError, TypeError) as error:
        raise UnknownFact(f"the facts are those of another version of powertrain ({error})") from None
