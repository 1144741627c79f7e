"""Which files of a folder hold its rows, and which part of a dataset is meant where it comes in parts: train by default.

A folder that `datasets` saved says so itself. Else its files are sorted by name; those that say train, valid or test in their
name, or in their folder's, are parts, and one part is read. Rows in two formats are refused: they are most often the same rows
twice. So is a mixture of rows and texts, except for the files that describe a dataset: README, LICENSE and their like.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath

from powertrain.data.reading import looks_like_text, text_files, visible_files
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean
from powertrain.records.json_files import read_json

TRAIN = "train"
# a word in a file's or folder's name -> the part it holds, as the hub's own loader reads them
WORDS = {"train": TRAIN, "training": TRAIN, "valid": "validation", "validation": "validation", "val": "validation",
         "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}


def choose_split(where: str, names: Sequence[str], wanted: str | None) -> str:
    """The one of `names` that `wanted` means: train if it is None, or the only one there is. Raises WrongUse if none is."""
    if wanted is None and len(names) == 1:
        return names[0]
    meant = wanted or TRAIN
    if meant in names:
        return meant
    for name in names:
        if WORDS.get(name) == WORDS.get(meant, meant):
            return name
    cure = did_you_mean(meant, names, key="data.split", otherwise="name one with data.split=NAME")
    raise WrongUse(f"{where} has no part {meant!r}; it has: {', '.join(names)}{cure}")


def named_split(path: PurePath) -> str | None:
    """The part that a file's own name says it holds, else the nearest folder's: "data/train-00000-of-00002.parquet"."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in WORDS:
                return WORDS[word]
    return None


# ------------------------------------------------------------------------------------------------ folders

LINES, SHEETS, OBJECTS, TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv"), (".json",), (".parquet", ".arrow", ".feather")
SAVE_AGAIN = "save the dataset again"
PACKED = ".gz"
DESCRIPTIONS = ("readme", "license", "licence", "citation", "changelog", "notice", "copying", "datasheet")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json", "metadata.json")


def data_suffix(path: Path) -> str | None:
    """The suffix that makes a file rows, such as ".jsonl" or ".csv.gz"; None for a text."""
    name = path.name.lower()
    inner = name.removesuffix(PACKED)
    packed = PACKED if inner != name else ""
    suffixes = (*LINES, *SHEETS, *OBJECTS) if packed else (*LINES, *SHEETS, *OBJECTS, *TABLES)
    return next((f"{suffix}{packed}" for suffix in suffixes if inner.endswith(suffix)), None)


def folder_files(folder: Path, split: str | None) -> list[Path]:
    """The files to read, in order. Raises WrongUse if there is none, or it is not clear which."""
    if (folder / "dataset_dict.json").is_file():
        parts = read_json(folder / "dataset_dict.json", SAVE_AGAIN).get("splits")
        if not isinstance(parts, list) or not parts:
            raise WrongUse(f"{folder} is a saved dataset, and its dataset_dict.json lists no splits; save it again")
        return _saved_files(folder / choose_split(str(folder), [str(part) for part in parts], split))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_files(folder)
    return _found_files(folder, split)


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of one part that `datasets` saved."""
    listed = read_json(folder / "state.json", SAVE_AGAIN).get("_data_files")
    names = [str(entry.get("filename")) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise WrongUse(f"{folder} is a saved dataset without its data: {', '.join(missing) or 'state.json lists no file'}; "
                       "save it again")
    return [folder / name for name in names]


def _found_files(folder: Path, split: str | None) -> list[Path]:
    files = [path for path in visible_files(folder) if path.stat().st_size]
    rows = [path for path in files if data_suffix(path) and path.name.lower() not in METADATA]
    others = [path for path in files if not data_suffix(path) and path.stem.lower() not in DESCRIPTIONS]
    texts = [path for path in others if looks_like_text(path)]
    # .json beside texts is a setting of the program whose sources these are
    if not rows or (texts and {data_suffix(path) for path in rows} == set(OBJECTS)):
        return text_files(folder)
    kinds = sorted({str(data_suffix(path)) for path in rows})
    cure = f"name the ones you mean with a glob, such as '{folder}/**/*{kinds[0]}'"
    if texts:
        raise WrongUse(f"{folder} mixes {_counted(len(rows), 'file')} of rows ({', '.join(kinds)}) and "
                       f"{_counted(len(texts), 'text')} (such as {texts[0].name}); {cure}")
    if len(kinds) > 1:
        raise WrongUse(f"{folder} holds rows as {' and '.join(kinds)}, which may be the same rows twice; {cure}")
    return _of_split(folder, rows, split)


def _of_split(folder: Path, files: Sequence[Path], split: str | None) -> list[Path]:
    """The files of one part. A file that names no part counts as training data."""
    parts: dict[str, list[Path]] = {}
    for path in files:
        parts.setdefault(named_split(path.relative_to(folder)) or TRAIN, []).append(path)
    if split is not None and split not in WORDS:
        named = [path for path in files if path.name.startswith((f"{split}.", f"{split}-")) or path.parent.name == split]
        if named:
            return named
    return parts[choose_split(str(folder), list(parts), split)]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
