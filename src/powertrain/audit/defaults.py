"""What each trainer does where a key is not set (defaults.yaml).

A recipe's defaults are others (TRL's and PEFT's recommendations), so a converted recipe writes its trainer's out. Sources: the
installed libraries, with the line; Axolotl's src/axolotl/utils/schemas and core/builders/base.py (2026-07); LLaMA-Factory's
src/llamafactory/hparams (2026-08); torchtune's recipes (2026-04) and nanoGPT's train.py; of the five systems, features.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

# trainers of pretrained models, and how they train them where the config does not say
METHODS: Mapping[str, str] = {"transformers": "full", "trl": "full", "axolotl": "full", "llama-factory": "lora",
                              "modelforge": "lora", "lora-trainer": "lora", "torchtune": "full"}


@dataclass(frozen=True)
class Default:
    value: Any
    source: str                              # "transformers 5.23, training_args.py:812"


_FILE: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (resources.files("powertrain") / "audit" / "defaults.yaml").read_text(encoding="utf-8"))
OWN_DEFAULTS: Mapping[str, Mapping[str, Any]] = _FILE["trainers"]        # of trainers that are not the libraries' own


def _libraries(*beginnings: str) -> dict[str, Default]:
    """Return the defaults of the libraries whose source begins so; of two, the later one's."""
    return {key: Default(value, f"{source}:{line}") for begins in beginnings for source, rows in _FILE["libraries"].items()
            if source.startswith(begins) for key, (value, line) in rows.items()}


_ALWAYS = ("peft", "transformers 5.23, utils/quantization", "torch")
_LIBRARIES = _libraries(*_ALWAYS)
DEFAULTS: Mapping[str, Mapping[str, Default]] = {
    "transformers": _libraries(*_ALWAYS, "transformers 5.23, training_args"),
    "trl": _libraries(*_ALWAYS, "transformers 5.23, training_args", "TRL"), "accelerate": _libraries(*_ALWAYS, "Accelerate")}


def default_of(framework: str, key: str) -> Any:
    """Return the library's value for a key that is not set; None if it has none, or none is known.

    The libraries' own defaults hold for every framework, a trainer's only for its own arguments.
    """
    found = DEFAULTS.get(framework, _LIBRARIES).get(key)
    return None if found is None else found.value
