"""A folder that appears whole or not at all: written beside its place, checked there, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from powertrain.data.publishing import sync
from powertrain.records import RunFailed, WrongUse


def check_output(folder: Path) -> None:
    """Raises WrongUse for a place where something is already."""
    if folder.exists() and not folder.is_dir():
        raise WrongUse(f"the output {folder} is a file; name a new folder with --output")
    if folder.is_dir() and any(folder.iterdir()):
        raise WrongUse(f"the output folder {folder} is not empty; name a new one with --output, or remove it first")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which becomes it at the end; if anything fails nothing is left.

    Raises WrongUse if the place is taken, and RunFailed if the disk refuses.
    """
    check_output(folder)
    building = folder.parent / f".building-{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        yield building
        for file in building.rglob("*"):
            if file.is_file():
                sync(file)
        if folder.is_dir():
            folder.rmdir()
        os.rename(building, folder)
        sync(folder.parent)
    except OSError as error:
        raise RunFailed(f"{folder} cannot be written: {error.strerror or error}; free space there, or name another folder "
                        "with --output") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
