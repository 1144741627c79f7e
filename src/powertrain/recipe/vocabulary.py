"""The vocabulary of everybody's keys: vocabulary.md as rows, one a key, and how they are looked up."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

import yaml

Fate = Literal["same", "renamed", "converted", "only", "together", "planned", "ignored", "refused"]
# spellings of files that are no recipes: an audit's names, our own keys under them, and what launches a training
NOT_IN_RECIPES = frozenset({"powertrain", "torch", "deepspeed", "accelerate"})
LAST = frozenset({"torchtune", "nanogpt", "character-transformer"})  # their short words mean other things elsewhere
# trainers whose configs take all arguments of another one
EXTENDS = {"trl": "transformers", "llama-factory": "transformers"}


@dataclass(frozen=True)
class Row:
    """One key: who spells it so, and what becomes of it."""

    key: str                                 # "lora_rank"; one that ends in * stands for all that begin so
    by: frozenset[str]                       # the trainers that have it
    audit: str                               # its name in an audit, or what reads its value: "adapter()"
    fate: Fate
    here: str                                # the recipe's key, a conversion, a group, or of a planned row its pin
    why: str                                 # a whole sentence


@dataclass(frozen=True)
class Meaning:
    """What becomes of a value."""

    ours: Mapping[str, Any] | None           # the recipe's keys, or an audit's; None: it has no counterpart
    why: str


@cache
def _cells(columns: int) -> list[list[str]]:
    """Return the cells of all rows of vocabulary.md's tables with so many columns."""
    text = (resources.files("powertrain") / "recipe" / "vocabulary.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in lines if len(cells) == columns and cells[0] not in ("key", "conversion", "---")]


@cache
def rows() -> tuple[Row, ...]:
    """Return the row of every key."""
    reasons = dict(_cells(2))
    return tuple(Row(key, frozenset(by.split()), audit or f"training.{key}", cast(Fate, fate), here, reasons.get(why, why))
                 for key, by, audit, fate, here, why in _cells(6))


@cache
def values() -> Mapping[str, Mapping[str, Meaning]]:
    """Return conversion -> value, in lower case -> its meaning; the value "*" stands for every other one.

    Of several rows of one value the last counts.
    """
    found: dict[str, dict[str, Meaning]] = {}
    reasons = dict(_cells(2))
    for conversions, words, here, why in _cells(4):
        meaning = Meaning(None if here == "refused" else yaml.safe_load(f"{{{here}}}"), reasons.get(why, why))
        for conversion in conversions.split(", "):
            found.setdefault(conversion, {}).update(dict.fromkeys(words.split(", "), meaning))
    return found


def find(key: str, trainer: str | None = None) -> Row | None:
    """Return the row of a key as this trainer spells it, or as anybody does; None where nobody has it."""
    found = _table(trainer).get(key)
    if found is not None:
        return found
    return next((row for row in _beginnings(trainer) if key.startswith(row.key[:-1])), None)


def keys_of(trainer: str) -> list[str]:
    """Return the keys that a trainer's configs may have, without those that stand for several."""
    return [key for key in _table(trainer) if not key.endswith("*")]


@cache
def by_audit_name() -> dict[str, Row]:
    """Return the row that says what becomes of each of the audit's names: that of Hugging Face's spelling, if there is one."""
    named = [row for row in rows() if not row.audit.endswith(")") and "powertrain" not in row.by]
    return {row.audit: row for row in sorted(named, key=lambda row: -_closeness(row))}


def _closeness(row: Row) -> int:
    order = ("torch", "transformers", "trl", "axolotl", "llama-factory", "modelforge")
    return next((place for place, name in enumerate(order) if name in row.by), len(order) + (row.by <= LAST))


@cache
def _table(trainer: str | None) -> dict[str, Row]:
    """Return the rows of a trainer, or of everybody whose files may be recipes; of several rows of one key the last counts."""
    if trainer is None:
        of_recipes = [row for row in rows() if row.by - NOT_IN_RECIPES]
        return {row.key: row for row in sorted(of_recipes, key=lambda row: not row.by <= LAST)}
    names = {trainer, EXTENDS.get(trainer, trainer)}
    return {row.key: row for row in sorted((row for row in rows() if row.by & names), key=lambda row: trainer in row.by)}


@cache
def _beginnings(trainer: str | None) -> tuple[Row, ...]:
    return tuple(sorted((row for key, row in _table(trainer).items() if key.endswith("*")), key=lambda row: -len(row.key)))
