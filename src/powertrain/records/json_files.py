"""JSON files that hold one object: read with an error that names the file, written with an end of line; and whole files.

A folder from elsewhere may hold a pipe or a device by the name of a file: these are refused, because opening one may never end.
"""

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from powertrain.records.errors import WrongUse

MOST_BYTES = 200 * 10**6     # of a file that is read: its objects take several times as much; large vocabularies have 40 MB
ABANDONED_AFTER_S = 86_400.0 # until then another process may be writing it


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises WrongUse for a pipe, a socket or a device, and OSError."""
    refuse_special(path)
    return open(path, "rb")


def read_json(path: Path, cure: str = "it was cut off or changed by hand: restore a copy of it", having: str = "",
              open_file: Callable[[Path], BinaryIO] = open_regular) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises WrongUse, with the cure, for a file that cannot be read, or holds no object, or one without the field `having`.
    """
    try:
        with open_file(path) as file:
            if (size_bytes := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                raise WrongUse(f"{path} has {size_bytes:,} bytes, and a JSON file that is read has at most {MOST_BYTES:,}; "
                               f"{cure}")
            value = json.loads(file.read())
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, WrongUse):
            raise
        raise WrongUse(f"{path} is not whole JSON ({error}); {cure}") from error
    if not isinstance(value, dict):
        raise WrongUse(f"{path} holds no JSON object but a {type(value).__name__}; {cure}")
    if having and having not in value:
        raise WrongUse(f"{path} has no {having}; {cure}")
    return value


def refuse_special(path: Path) -> None:
    """Raise WrongUse for a pipe, a socket or a device; OSError where there is nothing."""
    if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
        raise WrongUse(f"{path} is a pipe, a socket or a device, which is not opened; put a file in its place")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, whole or not at all: a kill leaves the old file. Raises OSError."""
    replace_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; see `draft_of`. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_of(path) as draft:
        draft.write_bytes(content)


@contextlib.contextmanager
def draft_of(path: Path, ending: str = "") -> Iterator[Path]:
    """Yield a file beside `path` to write to, with this ending: it becomes `path` at the end, and is removed after an error.

    Other processes see the old content or the new one, also after a power failure. Raises OSError.
    """
    clear_abandoned(path.parent, f".{path.name}.*.tmp{ending}")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp{ending}")
    try:
        yield draft
        sync(draft)                          # or the name might be on the disk before the content
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def clear_abandoned(folder: Path, pattern: str, after_s: float = ABANDONED_AFTER_S) -> None:
    """Remove what killed processes have left of files and folders that they were writing, under names like `pattern`."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < time.time() - after_s:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def sync(path: Path) -> None:
    """Return when the disk has the file, or the folder's list of names. Raises OSError.

    Windows opens no folder, and syncs no file that is open for reading only.
    """
    on_windows = not hasattr(os, "O_DIRECTORY")
    if on_windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if on_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
