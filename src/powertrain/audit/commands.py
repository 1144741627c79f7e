"""The commands by which a project starts its script: those in its shell scripts and its README."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from powertrain.audit.script import Script
from powertrain.records.findings import Place

STARTERS = ("python", "torchrun", "accelerate", "deepspeed")
ENDS = (";", "&&", "||", "|", "&", "#", ">", ">>", "<", "2>&1", "```", "`")
MOST_FILES, MOST_BYTES = 200, 200_000        # of a project's shell scripts, and of one


@dataclass(frozen=True)
class Command:
    """One command that starts the script."""

    place: Place
    words: tuple[str, ...]                   # behind the script's name
    starter: tuple[str, ...]                 # before it

    @property
    def options(self) -> Iterator[str]:
        yield from (word[2:].partition("=")[0] for word in self.words if re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", word))


@lru_cache(maxsize=2)
def commands(script: Script) -> tuple[Command, ...]:
    """Return the commands of the project that start the script."""
    root = script.root or script.path.parent
    files = [*sorted(root.rglob("*.sh"))[:MOST_FILES], *sorted(root.glob("README*"))]
    return tuple(command for file in files if file.is_file() and file.stat().st_size <= MOST_BYTES
                 for command in _of_file(script, file, root))


def _of_file(script: Script, file: Path, root: Path) -> Iterator[Command]:
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    at = 0
    while at < len(lines):
        first, text = at, lines[at].rstrip()
        while text.endswith("\\") and at + 1 < len(lines):
            at += 1
            text = text[:-1] + " " + lines[at].strip()
        at += 1
        if script.path.name not in text or text.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(text.rstrip("\\"), posix=True)
        except ValueError:
            continue
        here = next((number for number, word in enumerate(words) if _is_the_script(script, word, file, root)), None)
        starts = here is not None and any(word.rpartition("/")[2].startswith(STARTERS) for word in words[:here])
        if here is not None and starts:
            behind = words[here + 1:]
            end = next((number for number, word in enumerate(behind) if word in ENDS), len(behind))
            yield Command(Place(str(file), first + 1), tuple(behind[:end]), tuple(words[:here]))


def _is_the_script(script: Script, word: str, file: Path, root: Path) -> bool:
    """Return whether a word of a command is the script's path, as said from the file's folder or the project's."""
    if word.rpartition("/")[2] != script.path.name:
        return False
    own, asked = script.path.resolve(), Path(word)
    if len(asked.parts) > 1:
        return own.as_posix().endswith(word.lstrip("./"))
    return own.parent in (file.parent.resolve(), root.resolve()) or len(list(root.rglob(script.path.name))) == 1
