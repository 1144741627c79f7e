"""JSON files that hold one object: read with an error that names the file, written with an end of line; and whole files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from powertrain.records.errors import WrongUse


def read_json(path: Path, cure: str = "it was cut off or changed by hand: restore a copy of it") -> dict[str, Any]:
    """Return the object in a JSON file. Raises WrongUse, with the cure, for a file that cannot be read or holds no object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WrongUse(f"{path} is not whole JSON ({error}); {cure}") from error
    if not isinstance(value, dict):
        raise WrongUse(f"{path} holds no JSON object but a {type(value).__name__}; {cure}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, whole or not at all: a kill leaves the old file. Raises OSError."""
    replace_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: other processes see the old content or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
