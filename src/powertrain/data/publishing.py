"""A folder that appears whole or not at all: written aside, flushed to disk, renamed.

meta.json, written last, holds the size of every other file; a folder whose files differ from it is not whole, and
counts as absent.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse

META = "meta.json"
ATTEMPTS = 10                                # to replace a damaged folder while other processes do the same


def is_whole(folder: Path) -> bool:
    """Whether `folder` was published and has every file at the size it was published with."""
    try:
        sizes = read_meta(folder)["files"]
        return all((folder / name).stat().st_size == size_bytes for name, size_bytes in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / META).read_bytes())
    return meta


def publish(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Makes `folder` whole: `build` writes into a folder beside it and returns the rest of meta.json.

    If another process was faster, its folder stays and this one's work is dropped. Raises WrongUse if the disk does
    not let it.
    """
    building = folder.parent / f".building-{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        meta = build(building)
        _write_meta(building, meta)
        _replace(folder, building)
    except OSError as error:
        raise WrongUse(f"the token cache {folder.parent} cannot be written: {error.strerror or error}; "
                       "free space there, change its permissions, or choose another cache folder") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_meta(folder: Path, meta: dict[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / META).write_text(json.dumps({**meta, "files": sizes}, indent=2) + "\n", encoding="utf-8")
    for path in [*files, folder / META, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)


def _replace(folder: Path, building: Path) -> None:
    for _ in range(ATTEMPTS):
        if is_whole(folder):
            return
        _drop(folder, building.with_name(f"{building.name}-damaged"))
        try:
            os.rename(building, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            continue
        sync(folder.parent)
        return
    raise WrongUse(f"{folder} is damaged, and other processes keep it from being replaced; stop them or remove it")


def _drop(folder: Path, aside: Path) -> None:
    """Removes what is at `folder`, if anything is: renamed first, so that no other process sees it half gone."""
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Return when the disk has the file, or the folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
