"""Where each value of a recipe comes from: a default, the recipe, a file, the command line or the planner.

A run keeps the origins of its values as data, in origins.json; the comments in recipe.yaml are made from them, for people.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from powertrain.records import WrongUse

Kind = Literal["default", "method default", "recipe", "file", "command line", "planner", "unknown"]
EMBEDDED = "default"                         # the recipe that is used where none is named


@dataclass(frozen=True)
class Origin:
    """Where one value comes from."""

    kind: Kind
    name: str = ""                           # of the recipe, the file or the method
    reason: str = ""                         # of the planner

    @property
    def is_default(self) -> bool:
        """Return whether nobody gave the value."""
        return self.kind in ("default", "method default")

    @property
    def is_users(self) -> bool:
        """Return whether the user gave the value: by a word, a file, or a recipe that the user named."""
        return self.kind in ("file", "command line") or (self.kind == "recipe" and self.name != EMBEDDED)

    def __str__(self) -> str:
        """Return the comment beside the value."""
        if self.kind == "method default":
            return f"default of method {self.name}"
        return f"planner: {self.reason}" if self.kind == "planner" else f"{self.kind} {self.name}".rstrip()

    def to_json(self) -> dict[str, str]:
        """Return the origin as origins.json holds it: without empty fields."""
        return {name: value for name, value in vars(self).items() if value}


DEFAULT, COMMAND_LINE = Origin("default"), Origin("command line")
Stored = Mapping[str, tuple[Any, Origin]]    # dotted key -> (value, origin): a recipe as a run's folder holds it


def from_json(found: Mapping[str, Any], where: str) -> dict[str, Origin]:
    """Return the origins that origins.json holds. Raises WrongUse for a file that no run wrote."""
    try:
        return {key: Origin(**fields) for key, fields in found.items()}
    except TypeError as error:
        raise WrongUse(f"{where} was not written by powertrain ({error})") from None


def asked_lines(recipe: Stored, *, planned: bool) -> list[str]:
    """Return `key: value  # origin` of the values that are no defaults; with `planned`, also of those of the planner."""
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}  # {origin}" for key, (value, origin) in recipe.items()
            if not origin.is_default and (planned or origin.kind != "planner")]


# ------------------------------------------------------------------------------------------------ runs without origins.json


def from_old_comments(recipe_text: str) -> dict[str, Origin]:
    """Return the origins in the comments of a recipe.yaml, for runs of before origins.json. Nothing else reads comments."""
    found, section = {}, ""
    for line in recipe_text.splitlines():
        if opened := re.fullmatch(r"(\w+):", line):
            section = f"{opened[1]}."
        elif written := re.fullmatch(r"( *)(\w+): .*  # (.*)", line):
            found[f"{section if written[1] else ''}{written[2]}"] = _of_comment(written[3])
    return found


def _of_comment(comment: str) -> Origin:
    if comment.startswith("planner: "):
        return Origin("planner", reason=comment.removeprefix("planner: "))
    kinds: dict[str, Kind] = {"default of method ": "method default", "recipe ": "recipe", "file ": "file"}
    for start, kind in kinds.items():
        if comment.startswith(start):
            return Origin(kind, comment.removeprefix(start))
    return {"default": DEFAULT, "command line": COMMAND_LINE}.get(comment, Origin("unknown", comment))
