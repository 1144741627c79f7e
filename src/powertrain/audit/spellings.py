"""The names that scripts of any age use for an argument, in the names of subject.py."""

from __future__ import annotations

from typing import Any

from powertrain.audit.configs.readers import READERS
from powertrain.recipe.vocabulary import find


def vocabulary(key: str, value: Any) -> tuple[str, Any]:
    """Return the key of subject.py and its value, for an argument as a script spells it: `training.group_by_length`."""
    section, _, leaf = key.partition(".")
    if leaf == "pretrained_model_name_or_path":
        return f"{section}.path", value
    if key == "model.use_flash_attention_2":
        return "model.attn_implementation", "flash_attention_2" if value else "sdpa"
    row = find(leaf, "trl") if section in ("training", "model") else None
    if row is None:
        return key, value
    name, said = READERS[row.audit](leaf, value)[0] if row.audit in READERS else (row.audit, value)
    return (name, said) if name.startswith(f"{section}.") else (key, value)
