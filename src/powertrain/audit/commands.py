"""The commands by which a project starts its scripts: those in shell scripts, Makefiles, documents and notebooks.

Of a shell's variables, those that the same file sets once to a literal are filled in: `LR=1e-4`, then `--lr $LR`; so are
what stands for them by default, `${LR:-1e-4}`, and lists of words, `"${ARGS[@]}"`.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, takewhile
from pathlib import Path

from powertrain.audit.configs import SUFFIXES
from powertrain.audit.project import root_of, walked
from powertrain.audit.script import Command, Script
from powertrain.records.findings import Place

STARTERS = ("python", "torchrun", "accelerate", "deepspeed")
TOOLS = ("llamafactory-cli", "axolotl", "tune")          # which take all their settings from a config
ENDS = (";", "&&", "||", "|", "&", "#", ">", "2>", "1>", "`")        # beginnings of words behind which another command stands
METHODS = ("train", "sft", "dpo", "grpo", "kto", "reward")           # behind the name of such a tool
TELLING = (".sh", ".bat", ".md", ".ipynb")
SET = re.compile(r"(?:export +|set +|readonly +)?([A-Za-z_]\w*)(?: *[:?]?= +|[?:]?=)([^#]*)|: +\"?\$\{(\w+):?=([^}]*)\}\"?")
ARRAY = re.compile(r"^([A-Za-z_]\w*)\+?=\(((?:[^()]|\$\([^()]*\))*)\)", re.MULTILINE)        # of words, over several lines
COMMENT = re.compile(r"(?:^|\s)#.*")
LOOP = re.compile(r"\s*(?:for|read)\s+(\w+)\b")
VARIABLE = re.compile(r"\"?\$\{(\w+)\[@\]\}\"?|\$(?:(\w+)|[({](\w+)[)}]|\{(\w+):?[-=]([^${}]*)\})")
INLINE = re.compile(r".*?`[>$ ]*((?:[A-Z_]+=\S+ +)*(?:python3?|torchrun|accelerate|deepspeed) [^`]+)`.*")   # in a sentence
UNKNOWN = re.compile(r"[$`()*]")
MOST_FOLDERS, MOST_BYTES = 1000, 200_000     # of a project, and of a shell script


@lru_cache(maxsize=2)
def project_files(script: Script) -> tuple[Path, ...]:
    """Return the files of the script's project."""
    return files_of((script.root or script.path.parent).resolve())


def files_of(root: Path) -> tuple[Path, ...]:
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


@dataclass(frozen=True)
class Line:
    """One statement of a shell that starts Python, in whatever file of the project it stands."""

    file: Path
    place: Place
    words: tuple[str, ...]


@lru_cache(maxsize=2)
def started_lines(script: Script) -> tuple[Line, ...]:
    """Return all statements of the project, and of the shell script that is audited, that start Python."""
    files = [file for file in project_files(script) if file.suffix in TELLING or file.name.startswith(("README", "Makefile"))]
    if script.shell is not None and (shell := script.shell.resolve()) not in files:
        files.append(shell)
    return tuple(line for file in files for line in _of_file(file, shown(script, file)))


def _of_file(file: Path, name: str) -> Iterator[Line]:
    lines = text_of(file).splitlines()
    if file.suffix in (".ipynb", ".md"):
        lines = [_of_notebook(line) if file.suffix == ".ipynb" else INLINE.sub(r"\1", line) for line in lines]
    set_once = _variables(lines)
    for number, text in _statements(lines):
        filled = _filled(re.sub(r";(?=\s|$)", " ;", text), set_once)
        if any(word in filled for word in STARTERS) and not text.lstrip().startswith(("#", "echo ", "printf ")):
            with suppress(ValueError):                   # of quotes without an end
                yield Line(file, Place(name, number), tuple(shlex.split(filled.replace("\\", "/") if file.suffix == ".bat"
                                                                        else filled)))


def _of_notebook(line: str) -> str:
    """Return the command of a line of a notebook's JSON that gives one to the shell, such as `!python train.py`; else ""."""
    with suppress(ValueError):
        text = json.loads(line.strip().removesuffix(","))
        return str(text).lstrip()[1:] if isinstance(text, str) and text.lstrip()[:1] in ("!", "%") else ""
    return ""


def _variables(lines: list[str]) -> dict[str, str]:
    """Return the variables that lines set to a literal, once: with `${RATE:-1e-4}` to what counts by default."""
    found: dict[str, list[str]] = {}
    for before, line in zip(("", *lines), lines, strict=False):
        if before.rstrip().endswith("\\"):
            continue                                     # a word of the command above: `name=value`
        matched, loop = SET.fullmatch(line.strip()), LOOP.match(line)
        if matched or loop:
            name, value = (matched[1] or matched[3], (matched[2] or matched[4] or "").strip()) if matched else (
                loop[1] if loop else "", "$")
            plain = value[1:-1] if value[:1] == value[-1:] and value[:1] in ("'", '"') else value
            found.setdefault(name, []).append(plain if line[:1].strip() else "$")        # within an `if` it may not be so
    known: dict[str, str] = {}
    for name, values in found.items():
        value = _filled(values[0], known)
        if len(values) == 1 and not UNKNOWN.search(value):
            known[name] = value
    for array in ARRAY.finditer("\n".join(lines)):
        words = " ".join(COMMENT.sub("", line).strip() for line in array[2].splitlines())
        known[f"{array[1]}[@]"] = f"{known.get(f'{array[1]}[@]', '')} {_filled(words, known)}".strip()
    return known


def _filled(text: str, known: dict[str, str]) -> str:
    return VARIABLE.sub(lambda found: known.get(f"{found[1]}[@]", found[0]) if found[1] else known.get(
        found[2] or found[3] or found[4], found[0] if found[5] is None else found[5]), text)


def started_by(shell: Path) -> Iterator[Path]:
    """Yield the scripts that a shell script starts by Python, then the configs that it gives to LLaMA-Factory and the like."""
    lines, own = text_of(shell).splitlines(), shell.resolve()
    set_once = _variables(lines)
    filled = (_filled(text, set_once) for _, text in _statements(lines) if not text.lstrip().startswith("#"))
    words = [[word.strip("'\"") for word in text.split()] for text in filled]
    above = [folder for folder in own.parents if folder.is_relative_to(root_of(own))]
    entered = [line[1] for line in words if line[:1] == ["cd"] and len(line) > 1]
    ends = [path.split("/", at)[at] for path in entered for at in range(path.count("/") + 1)]        # of the author's path too
    folders = [*(folder / end for folder in above for end in ends), *above]
    for starters, suffixes in ((STARTERS, (".py",)), (TOOLS, SUFFIXES)):
        for word in (word for line in words if any(each.startswith(starters) for each in line) for word in line):
            found = next((folder / word for folder in folders if word.endswith(suffixes) and (folder / word).is_file()), None)
            if found is not None:
                yield Path(os.path.normpath(shell.parent / os.path.relpath(found, own.parent)))      # as the shell script's


def options_told(shell: Path) -> Iterator[Command]:
    """Yield the commands of a shell script that give LLaMA-Factory or TRL all settings as options, without a config."""
    lines = text_of(shell).splitlines()
    known = _variables(lines)
    for number, text in _statements(lines):
        words: list[str] = []
        with suppress(ValueError):
            words = shlex.split(_filled(text, known), comments=True)
        at = next((at for at, word in enumerate(words) if word.endswith(".py") or (
            at and word in METHODS and words[at - 1].endswith(("llamafactory-cli", "trl")))), len(words))
        options = tuple(takewhile(lambda word: not word.startswith(ENDS), words[at + 1:]))
        if options[:1] and options[0].startswith("--") and (words[at] in METHODS or "--stage" in options):
            yield Command(Place(str(shell), number), options, tuple(words[:at]), words[at])


@lru_cache(maxsize=2)
def commands(script: Script) -> tuple[Command, ...]:
    """Return the commands of the project that start the script; those of the shell script alone where that is audited."""
    root, own = (script.root or script.path.parent).resolve(), script.path.resolve()
    only_one = sum(file.name == own.name for file in project_files(script)) == 1
    shell = script.shell.resolve() if script.shell is not None else None
    found = [(line.file == shell, _command(line, own, only_one or line.file == shell or own.parent in (line.file.parent, root)))
             for line in started_lines(script)]
    asked = any(of_shell and command is not None for of_shell, command in found)
    return tuple(command for of_shell, command in found if command is not None and (of_shell or not asked))


def has_deepspeed(script: Script, command: Command) -> bool:
    """Return whether a command trains with DeepSpeed: its words say so, or a config that they name."""
    words = (*command.starter, *command.words)
    configs = [text_of((script.root or script.path.parent) / word) for word in words if word.endswith((".yaml", ".yml"))]
    return any(re.search(r"deepspeed|zero_?[123]", text.lower()) for text in (*words, *configs))


def _command(line: Line, own: Path, by_name: bool) -> Command | None:
    """Return a line's command for a script, if it starts it; `by_name`: its name alone means this script."""
    words, module = line.words, own.with_suffix("").as_posix()
    here = next((at for at, word in enumerate(words) if (Path(word).name == own.name and (
        by_name if word == own.name else own.as_posix().endswith("/" + word.lstrip("./")))) or (
        at and words[at - 1] == "-m" and module.endswith("/" + word.replace(".", "/")))), 0)
    if not any(word.rpartition("/")[2].startswith(STARTERS) for word in words[:here]):
        return None
    behind = words[here + 1:]
    end = next((at for at, word in enumerate(behind) if word.startswith(ENDS)), len(behind))
    return Command(line.place, tuple(behind[:end]), tuple(words[:here]), words[here])


def _statements(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of lines, of which those that end in a backslash (in Windows ^) go on in the next."""
    text, first = "", 1
    for number, line in enumerate(lines, 1):
        text += line.strip().rstrip("\\^") + " "
        if not line.rstrip().endswith(("\\", "^")) or number == len(lines):
            yield first, text
            text, first = "", number + 1
