"""The commands by which a project starts its script: those in its shell scripts and its README."""

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

from powertrain.audit.project import walked
from powertrain.audit.script import Command, Script
from powertrain.records.findings import Place

STARTERS = ("python", "torchrun", "accelerate", "deepspeed")
ENDS = (";", "&&", "||", "|", "&", "#", ">", ">>", "<", "2>&1", "```", "`")
MOST_FOLDERS, MOST_BYTES = 1000, 200_000     # of a project, and of a shell script


@lru_cache(maxsize=2)
def project_files(script: Script) -> tuple[Path, ...]:
    """Return the files of the script's project."""
    root = (script.root or script.path.parent).resolve()
    return tuple(chain.from_iterable(islice(walked(root), MOST_FOLDERS)))


def text_of(file: Path) -> str:
    """Return the text of a small file of the project; "" for links, devices, large files and what cannot be read."""
    with suppress(OSError):
        if file.is_file() and not file.is_symlink() and file.stat().st_size <= MOST_BYTES:
            return file.read_text(encoding="utf-8", errors="replace").replace("\0", "")      # UTF-16 is read well enough
    return ""


def shown(script: Script, file: Path) -> str:
    """Return a file's path as the script's own is given: beside `work/train.py` it is `work/run.sh`."""
    path = os.path.relpath(file, script.path.resolve().parent)
    return str(file) if path.startswith("..") else str(script.path.parent / path)


@lru_cache(maxsize=2)
def commands(script: Script) -> tuple[Command, ...]:
    """Return the commands of the project that start the script."""
    root, own, files = (script.root or script.path.parent).resolve(), script.path.resolve(), project_files(script)
    only_one = sum(file.name == own.name for file in files) == 1
    told = [file for file in files if file.suffix == ".sh" or (file.parent == root and file.name.startswith("README"))]
    return tuple(command for file in told
                 for command in _of_file(file, shown(script, file), own, only_one or own.parent in (file.parent, root)))


def _of_file(file: Path, name: str, own: Path, by_name: bool) -> Iterator[Command]:
    """Yield the commands of a file that start a script; `by_name`: its name alone means this script."""
    for number, text in _statements(text_of(file).splitlines()):
        if own.name not in text or text.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(text)
        except ValueError:
            continue
        here = next((at for at, word in enumerate(words) if Path(word).name == own.name and (
            by_name if word == own.name else own.as_posix().endswith(word.lstrip("./")))), 0)
        if any(word.rpartition("/")[2].startswith(STARTERS) for word in words[:here]):
            behind = words[here + 1:]
            end = next((at for at, word in enumerate(behind) if word in ENDS), len(behind))
            yield Command(Place(name, number), tuple(behind[:end]), tuple(words[:here]))


def _statements(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of lines, of which those that end in a backslash go on in the next."""
    text, first = "", 1
    for number, line in enumerate(lines, 1):
        text += line.strip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\") or number == len(lines):
            yield first, text
            text, first = "", number + 1
