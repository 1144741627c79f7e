"""Which part of a dataset is meant, where it comes in parts: train, unless another is named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import PurePath

from powertrain.records import WrongUse

TRAIN = "train"
# a word in a file's or folder's name -> the part it holds, as the hub's own loader reads them
WORDS = {"train": TRAIN, "training": TRAIN, "valid": "validation", "validation": "validation", "val": "validation",
         "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}


def choose_split(where: str, names: Sequence[str], wanted: str | None) -> str:
    """The one of `names` that `wanted` means: train if it is None, or the only one there is. Raises WrongUse if none is."""
    if wanted is None and len(names) == 1:
        return names[0]
    meant = wanted or TRAIN
    for name in names:
        if name == meant:
            return name
    for name in names:
        if WORDS.get(name) == WORDS.get(meant, meant):
            return name
    near = difflib.get_close_matches(meant, names, n=1)
    cure = f"did you mean data.split={near[0]}?" if near else "name one with data.split=NAME"
    raise WrongUse(f"{where} has no part {meant!r}; it has: {', '.join(names)}; {cure}")


def named_split(path: PurePath) -> str | None:
    """The part that a file's own name says it holds, else the nearest folder's: "data/train-00000-of-00002.parquet"."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in WORDS:
                return WORDS[word]
    return None
