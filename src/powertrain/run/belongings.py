"""What a run is made from and a machine alone may have: its data, a base model in a folder. The mirror takes it along.

On another machine it lies in the run's folder, material/, each file at the path that it had: a folder, a glob and a file name
the same files there, in the same order. The run's recipe keeps the old paths; `found_again` says where they are now.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from powertrain.data.rows.folders import CORPORA
from powertrain.data.rows.reading import ROW_SETS
from powertrain.mirror.waiting import MATERIAL, MATERIAL_LIST
from powertrain.recipe import Recipe, flat, quoted, read_yaml
from powertrain.recipe.schema import OWN_TOKENIZERS
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json

KEYS = ("data.source", "data.validation_source", "data.tokenizer", "data.chat_template", "model.path", "model.adapter")
NAMED = {*CORPORA, *ROW_SETS, *OWN_TOKENIZERS, "plain", "chatml", "raw"}     # values that are no places


def belongings(recipe: Recipe) -> tuple[dict[str, str], list[Path]]:
    """Return the places that the recipe names on this machine, each with its full path, and the files that are there."""
    places = {value: absolute for value in _values(dict(flat(recipe.model_dump()))) if value not in NAMED
              if glob.glob(absolute := os.path.abspath(os.path.expanduser(value)), recursive=True)}
    return places, sorted({file for absolute in places.values() for file in _files(absolute)})


def _values(recipe: Mapping[str, Any]) -> Iterator[str]:
    for key in KEYS:
        value = recipe.get(key)
        yield from value if isinstance(value, list) else [value] if value else []


def _files(absolute: str) -> Iterator[Path]:
    for found in map(Path, glob.glob(absolute, recursive=True)):
        yield from (file for file in found.rglob("*") if file.is_file()) if found.is_dir() else [found]


def found_again(run: Path) -> list[str]:
    """Return `key=value` words that name the places of a fetched run's recipe on this machine; none for other runs."""
    if not (run / MATERIAL / MATERIAL_LIST).is_file():
        return []
    places = read_json(run / MATERIAL / MATERIAL_LIST).get("places")
    recipe = dict(flat(read_yaml((run / "recipe.yaml").read_text(encoding="utf-8"), str(run / "recipe.yaml"))))
    if not isinstance(places, dict):
        raise WrongUse(f"{run / MATERIAL / MATERIAL_LIST} was changed by hand; fetch the run again")

    def moved(value: Any) -> Any:
        return str(run.resolve() / MATERIAL) + places[value] if value in places else value

    words = []
    for key in KEYS:
        old = recipe.get(key)
        new = [moved(one) for one in old] if isinstance(old, list) else moved(old)
        words += [f"{key}={quoted(new)}"] if new != old else []
    return words
