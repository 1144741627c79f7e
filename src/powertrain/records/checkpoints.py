"""Checkpoints as they lie on a disk: their names, their files, whether they are whole, and which of them stay. No torch.

A checkpoint is a folder step-NNNNNN with a manifest of sha256 sums, which is written last; training/checkpoint.py writes it.
"""

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from powertrain.records.errors import WrongUse, first_line
from powertrain.records.json_files import read_json, refuse_special

FORMAT, SHARDED_FORMAT = 1, 2
FOLDER = re.compile(r"step-(\d{6,})")
MANIFEST = "MANIFEST.json"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
ABOUT = "metadata.json"                      # what somebody who looks for a checkpoint wants to know of it; not for loading
PLACES = "places"                            # in a shard's metadata: key -> the tensor it is a part of, dimension, first row
MAY_BE = {ABOUT, "random.safetensors"}       # earlier versions wrote the other, before each pass had a seed of its own


def shard_name(name: str, shard: int, shards: int) -> str:
    """Return the file of one shard, from 0: "model.safetensors", or "model-00001-of-00004.safetensors"."""
    return name if shards == 1 else name.replace(".", f"-{shard + 1:05d}-of-{shards:05d}.")


def files_of(shards: int) -> list[str]:
    """Return the files of a checkpoint of so many shards."""
    return [shard_name(name, shard, shards) for name in FILES[:2] for shard in range(shards)] + [*FILES[2:]]


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return the published checkpoints by step, in order. Whether each is whole is not looked at: `what_is_wrong` reads it."""
    found = {int(match[1]): path for path in (folder.iterdir() if folder.is_dir() else ())
             if (match := FOLDER.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


def newest_checkpoint(folder: Path, until: float = math.inf) -> tuple[Path | None, list[tuple[str, str]]]:
    """Return the newest checkpoint, of step `until` at most, that verifies, and (name, reason) of newer ones that do not."""
    rejected: list[tuple[str, str]] = []
    for path in (path for step, path in reversed(checkpoints_in(folder).items()) if step <= until):
        reason = what_is_wrong(path)
        if reason is None:
            return path, rejected
        rejected.append((path.name, reason))
    return None, rejected


def what_is_wrong(path: Path) -> str | None:
    """Return the first thing that is wrong with a checkpoint; None for a whole one. It may be anybody's: nothing is trusted."""
    try:
        return _what_is_wrong(path)
    except OSError as error:                 # of the disk, or without permission: an older checkpoint may be readable
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"


def _what_is_wrong(path: Path) -> str | None:
    if not (path / MANIFEST).exists():
        return f"{MANIFEST} is missing, so the checkpoint was never finished"
    try:
        refuse_special(path / MANIFEST)
    except WrongUse:
        return f"{MANIFEST} cannot be read: it is a pipe, a socket or a device"
    try:
        manifest = read_json(path / MANIFEST)
    except WrongUse:
        return f"{MANIFEST} cannot be read: it was cut off or changed"
    if (written_format := manifest.get("format")) not in (FORMAT, SHARDED_FORMAT):
        return f"it has format {written_format}, and this version reads format {SHARDED_FORMAT}; upgrade powertrain"
    files, shards = manifest.get("files"), manifest.get("shards", 1)
    if not isinstance(files, dict) or type(shards) is not int or not 1 <= shards <= len(files):
        return f"{MANIFEST} cannot be read: it lists no files, or not as many as it names shards"
    if set(files) - MAY_BE != set(expected := files_of(shards)):
        return f"{MANIFEST} lists {', '.join(sorted(files))} where {', '.join(sorted(expected))} belong"
    return next(filter(None, (_what_is_wrong_with(path / name, entry) for name, entry in files.items())), None)


def _what_is_wrong_with(file: Path, entry: Any) -> str | None:
    """Return how a file of a checkpoint differs from its entry in the manifest, or how its inside is not what it should be."""
    if file.is_symlink():
        return f"{file.name} is a link, and a checkpoint holds its own files"
    if not file.is_file():
        return f"{file.name} is missing"
    if entry_of(file) != entry:
        return f"{file.name} is damaged: its size or its sha256 is not that of the file that was written"
    try:                                     # the sums are right, and whoever wrote the file may have written them too
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy") as opened:
                places_in(opened)
        else:
            read_json(file)
    except (SafetensorError, ValueError, RecursionError, TypeError, AttributeError) as error:
        return f"{file.name} cannot be read: {first_line(error)}"
    return None


def places_in(opened: Any) -> dict[str, tuple[str, int, int]]:
    """Return key -> (tensor, dimension, first row or column) of each key of an open safetensors file of a checkpoint.

    Raises ValueError, TypeError and AttributeError where a damaged or hostile file says something else.
    """
    told = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
    places = {}
    for key in opened.keys():  # noqa: SIM118
        name, dimension, first = told.get(key, (key, 0, 0))
        if type(dimension) is not int or type(first) is not int or dimension not in (0, 1) or not 0 <= first < 2**62:
            raise ValueError(f"{key} is said to begin at {first} of dimension {dimension}")
        places[key] = (name, dimension, first)
    return places


def keep_only(folder: Path, *, newest: int, evaluations: Mapping[int, float]) -> None:
    """Delete all but the newest checkpoints and the one with the lowest held-out loss. What a link leads to is not touched."""
    published = checkpoints_in(folder)
    kept = {*list(published)[-newest:], *by_loss(published, evaluations)[:1]}
    for path in (path for step, path in published.items() if step not in kept):
        delete_checkpoint(path)


def set_aside_after(folder: Path, step: int) -> list[int]:
    """Rename the checkpoints of later steps, so that no run continues from one of them; return these. Raises OSError."""
    later = [one for one in checkpoints_in(folder).items() if one[0] > step]
    for _, path in reversed(later):          # the newest first: a kill leaves a history without a gap
        set_aside(path)
    return [one for one, _ in later]


def set_aside(path: Path) -> None:
    """Rename a checkpoint, so that the run neither continues from it nor deletes it. Raises OSError."""
    path.rename(path.with_name(f"rejected-{path.name}-{time.time_ns()}"))


def by_loss(steps: Iterable[int], evaluations: Mapping[int, float]) -> list[int]:
    """Return those of the steps that have a finite held-out loss, the lowest first; of equal losses the earliest step."""
    evaluated = [step for step in steps if math.isfinite(evaluations.get(step, math.nan))]
    return sorted(evaluated, key=lambda step: (evaluations[step], step))


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint, but not what a link leads to. Raises OSError."""
    if not path.is_symlink():
        (path / MANIFEST).unlink(missing_ok=True)        # first: half a deletion must not look like a checkpoint
        shutil.rmtree(path)


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary folders of saves that were killed."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def entry_of(path: Path) -> dict[str, Any]:
    """Return the size and the sha256 of a file, as a manifest lists them."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
