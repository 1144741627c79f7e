"""A path -> what it sets, whether it is a script or a config of any trainer."""

from __future__ import annotations

from pathlib import Path

from powertrain.audit.reading_script import read_script
from powertrain.audit.subject import Subject
from powertrain.records import WrongUse

CONFIGS = (".yaml", ".yml", ".json")


def read_subject(path: Path) -> Subject:
    """The settings of one file. Raises WrongUse where it cannot be read."""
    if path.is_dir():
        raise WrongUse(f"{path} is a folder; name one of its files, or audit the folder to have each read by itself")
    if not path.exists():
        raise WrongUse(f"there is no {path}; give the path of a training script (.py) or a config (.yaml, .json)")
    if not path.is_file():
        raise WrongUse(f"{path} is no regular file, and is not opened; give the path of a script or config")
    try:
        return _read(path)
    except RecursionError:
        raise WrongUse(f"{path} nests brackets or operators too deep to be followed; is it a program's output?") from None


def _read(path: Path) -> Subject:
    if path.suffix == ".py":
        subject = read_script(path)
        return subject if subject.framework != "unknown" else _assignments(path) or subject
    if path.suffix not in CONFIGS:
        cure = "; export it as a script (jupyter nbconvert --to script)" if path.suffix == ".ipynb" else ""
        raise WrongUse(f"{path} is neither a script (.py) nor a config ({', '.join(CONFIGS)}){cure}")
    from powertrain.audit.configs import read_config

    return read_config(path)


def _assignments(path: Path) -> Subject | None:
    """A Python file that trains nothing and only sets values, as a config; None where it is not one that is known."""
    from powertrain.audit.configs import read_config

    try:
        return read_config(path)
    except WrongUse:
        return None


def files_in(path: Path) -> list[Path]:
    """The file itself, or the scripts and configs of a folder."""
    return [path] if not path.is_dir() else sorted(item for item in path.iterdir() if item.suffix in (".py", *CONFIGS))
