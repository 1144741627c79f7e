"""A folder that appears whole or not at all: written aside, flushed to disk, renamed.

A folder of the cache has meta.json, written last, with the size and sums of every other file and its own sum; a folder whose
files differ from it is not whole, and counts as absent. Of a large file some pieces are read, others each time, so that a start
takes no longer with more data. The folder's name is a key: a digest of all that decides its content.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.records import RunFailed, WrongUse
from powertrain.records.json_files import clear_abandoned
from powertrain.records.json_files import sync as sync

META = "meta.json"
SUMMED_BYTES = 1 << 16
PIECE_BYTES = 1 << 24                        # that have a sum of their own: 16 MiB
PIECES_READ = 4                              # of a file, at most
ATTEMPTS = 10                                # to replace a damaged folder while other processes do the same


def key_of(content: Any) -> str:
    """Return the key of a folder whose content is decided by the JSON value `content`."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def is_whole(folder: Path, most: int = PIECES_READ) -> bool:
    """Return whether `folder` was published and every file has the content that it was published with.

    Of a large file `most` pieces are read, drawn anew.
    """
    try:
        meta = read_meta(folder)
        return bool(meta.pop("sum") == key_of(meta)) and all(_agrees(folder / name, most, *entry)
                                                            for name, entry in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def entry_of(path: Path) -> list[int]:
    """Return the size of a file and the CRC-32 of each piece: damage changes it, and it costs less than a hash."""
    size = path.stat().st_size
    return [size, *(_sum_of(path, start, PIECE_BYTES) for start in range(0, max(size, 1), PIECE_BYTES))]


def _agrees(path: Path, most: int, size: int, *sums: int) -> bool:
    """Return whether a file has this size and, in `most` of its pieces, these sums; one sum is of all of the file."""
    piece_bytes = PIECE_BYTES if len(sums) > 1 else size
    read = SystemRandom().sample(range(len(sums)), min(len(sums), most))
    return path.stat().st_size == size and all(_sum_of(path, piece * piece_bytes, piece_bytes) == sums[piece] for piece in read)


def _sum_of(path: Path, start: int, size: int) -> int:
    found = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while size > 0 and (part := file.read(min(size, SUMMED_BYTES))):
            found, size = zlib.crc32(part, found), size - len(part)
    return found


def read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / META).read_bytes())
    return meta


def mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Map a file of a whole folder into memory, read-only."""
    # an empty file cannot be mapped; asarray, because a memmap's own slices are slow to make
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """Make a folder beside `folder`, to be filled and renamed to it; whatever is left there is removed in the end."""
    building = folder.parent / f".building-{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
    clear_abandoned(folder.parent, f".building-{folder.name}-*")
    try:
        building.mkdir(parents=True)
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def publish(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Make `folder` whole: `build` writes into a folder beside it and returns the rest of meta.json.

    If another process was faster, its folder stays and this one's work is dropped. Raises WrongUse if the disk refuses.
    """
    try:
        with _building(folder) as building:
            meta = build(building)
            files = sorted(path for path in building.rglob("*") if path.is_file())
            meta |= {"files": {path.relative_to(building).as_posix(): entry_of(path) for path in files}}
            (building / META).write_text(json.dumps({**meta, "sum": key_of(meta)}, indent=2) + "\n", encoding="utf-8")
            for path in (*building.rglob("*"), building):
                sync(path)
            _replace(folder, building)
    except OSError as error:
        raise WrongUse(f"the token cache {folder.parent} cannot be written: {error.strerror or error}; "
                       "free space there, change its permissions, or choose another cache folder") from error


def check_output(folder: Path) -> None:
    """Raise WrongUse for an export's folder if something is already in that place."""
    if folder.exists() and not folder.is_dir():
        raise WrongUse(f"the output {folder} is a file; name a new folder with --output")
    if folder.is_dir() and any(folder.iterdir()):
        raise WrongUse(f"the output folder {folder} is not empty; name a new one with --output, or remove it first")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write an export into, which is renamed to `folder` at the end; if anything fails nothing is left.

    Raises WrongUse if the place is taken, and RunFailed if the disk refuses.
    """
    check_output(folder)
    try:
        with _building(folder) as building:
            yield building
            for path in (*building.rglob("*"), building):
                sync(path)
            if folder.is_dir():
                folder.rmdir()
            os.rename(building, folder)
            sync(folder.parent)
    except OSError as error:
        raise RunFailed(f"{folder} cannot be written: {error.strerror or error}; free space there, or name another folder "
                        "with --output") from error


def _replace(folder: Path, building: Path) -> None:
    for _ in range(ATTEMPTS):
        if is_whole(folder, most=sys.maxsize):           # another process was faster: of a damaged one no piece is missed
            return
        aside = building.with_name(f"{building.name}-damaged")
        with suppress(FileNotFoundError):    # renamed first, so that no other process sees it half gone
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            os.rename(building, folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            continue
        sync(folder.parent)
        return
    raise WrongUse(f"{folder} is damaged, and other processes keep it from being replaced; stop them or remove it")
