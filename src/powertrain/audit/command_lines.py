"""What a command of the project gives its script: to argparse, to parsers of dataclasses, to functions and to Hydra.

A word that a shell would put something in for, such as `$LR` or `<path>`, is not known.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from powertrain.audit.configs import Marked, read_marked
from powertrain.audit.parsing import read_text
from powertrain.audit.script import Command, Script, Setting
from powertrain.audit.syntax import argument
from powertrain.audit.values import FILLED_IN, ClassValue, Made, Reference, Table, TextNumber, Unread, known_word
from powertrain.records import WrongUse
from powertrain.records.findings import Place

OPTION = re.compile(r"--?[A-Za-z]")
TRUE, FALSE = ("true", "1", "yes", "y", "t"), ("false", "0", "no", "n", "f")
CASTS = {"int": int, "float": float, "str": str, "bool": bool, "pathlib.Path": str}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
# numbers that PyYAML reads as texts: an exponent needs a dot before it, and a sign
TEXT_TO_PYYAML = re.compile(r":\s*[-+]?(\d+e[-+]?\d+|\d*\.\d*e\d+)\s*(#.*)?$", re.IGNORECASE)
FILLED_BY_HYDRA = re.compile(r"\$\{|\?\?\?")


def is_option(word: str) -> bool:
    return OPTION.match(word) is not None


def number_or_text(word: str) -> Any:
    """Return what a word says where no type is asked for: a number, True, False, None or the text."""
    plain = {"true": True, "false": False, "none": None, "null": None}
    if word.lower() in plain:
        return plain[word.lower()]
    if NUMBER.fullmatch(word):
        return int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word)
    return known_word(word)


def options_of(command: Command) -> dict[str, list[str]]:
    """Return the words behind each option of a command, up to the next one: `--lr 1e-4` and `--lr=1e-4` are the same."""
    found: dict[str, list[str]] = {}
    here: list[str] = []
    for word in command.words:
        if is_option(word):
            name, joined, value = word.lstrip("-").partition("=")
            found[name.replace("-", "_")] = here = [value] if joined else []
        else:
            here.append(word)
    return found


def settings_of(command: Command) -> dict[str, Setting]:
    """Return the options of a command by name, each as number or text; True for one without a value."""
    found: dict[str, Setting] = {}
    for name, words in options_of(command).items():
        value = [number_or_text(word) for word in words]
        found[name] = _said(command, name, words, True if not value else value[0] if len(value) == 1 else value)
    return found


def _said(command: Command, name: str, words: Sequence[str], value: Any) -> Setting:
    return Setting(value, command.place, " ".join((f"--{name}", *words)))


def of_argparse(command: Command, added: Sequence[Made]) -> dict[str, Setting]:
    """Return what a command gives the options and arguments that a parser of argparse was told of, by name."""
    return {dest_of(made): _said(command, dest_of(made), words, _converted(made, words))
            for made, words in read_by_argparse(command, added) if made is not None}


def read_by_argparse(command: Command, added: Sequence[Made]) -> Iterator[tuple[Made | None, list[str]]]:
    """Yield (argument, its words) of a command; None for a word that fits no argument of the parser."""
    flags = {flag: made for made in added for flag in made.positional if isinstance(flag, str) and flag.startswith("-")}
    places = [made for made in added if isinstance(first := made.argument(0, "dest"), str) and not first.startswith("-")]
    words = list(command.words)
    while words:
        word = words.pop(0)
        flag, joined, value = word.partition("=") if is_option(word) else ("", "", "")
        begun = [full for full in flags if flag.startswith("--") and full.startswith(flag)]
        made = flags.get(flag) or (flags[begun[0]] if len(begun) == 1 else None)
        if made is None and not flag and places:
            made, value, joined = places.pop(0), word, "="
        taken = [value] if joined and made is not None else []
        while made is not None and words and not is_option(words[0]) and len(taken) < _most(made):
            taken.append(words.pop(0))
        yield made, taken if made is not None else [word]


def dest_of(made: Made) -> str:
    """Return the name under which argparse keeps an argument."""
    flags = [item for item in made.positional if isinstance(item, str)]
    long = [flag for flag in flags if flag.startswith("--")] or flags or [""]
    return str(made.get("dest", long[0].lstrip("-").replace("-", "_")))


def _most(made: Made) -> int:
    """Return how many words an argument takes at most."""
    if str(made.get("action", "store")) not in ("store", "append"):
        return 0
    nargs = made.get("nargs")
    return nargs if isinstance(nargs, int) else 1 if nargs in (None, "?") else 1000


def _converted(made: Made, words: Sequence[str]) -> Any:
    action, cast = made.get("action", "store"), made.get("type")
    if action in ("store_true", "store_false"):
        return action == "store_true"
    if action == "store_const" or (not words and made.get("nargs") == "?"):
        return made.get("const")
    if action not in ("store", "append") or not words:
        return Unread(" ".join(map(str, made.positional[:1])))
    kind = CASTS.get(cast.name) if isinstance(cast, Reference) else str if cast is None else None
    values = [_cast(kind, word) for word in words]
    return values[0] if made.get("nargs") in (None, "?") and action == "store" else values


def _cast(kind: Any, word: str) -> Any:
    with suppress(ValueError):
        return Unread(word) if kind is None or FILLED_IN.search(word) else kind(word)
    return Unread(word)


def of_fields(command: Command, kind: ClassValue) -> dict[str, Setting]:
    """Return what a command gives the fields of a dataclass of the project."""
    given, found = options_of(command), dict[str, Setting]()
    for name, annotation in annotations(kind):
        off = f"no_{name}" in given
        if name in given or off:
            words = given.get(name, ["False"])
            values = [_of_annotation(annotation, word) for word in words]
            value = True if not values else values if "list" in annotation.lower() else values[0]
            found[name] = _said(command, name, words, value)
    return found


def annotations(kind: ClassValue) -> Iterator[tuple[str, str]]:
    """Yield the names of a dataclass's fields with their types as spelled, those of its bases first."""
    for each in reversed(kind.lineage):
        yield from ((item.target.id, ast.unparse(item.annotation)) for item in each.node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))


def _of_annotation(annotation: str, word: str) -> Any:
    if "bool" in annotation:
        return True if word.lower() in TRUE else False if word.lower() in FALSE else Unread(word)
    kind = next((CASTS[name] for name in ("int", "float") if re.search(rf"\b{name}\b", annotation)), str)
    return _cast(kind, word)


def of_hydra(function: ast.AST, script: Script, folder: Path) -> Table | None:
    """Return the config that `@hydra.main` reads for a function, with what the command overrides; None without it."""
    made = next((item for item in getattr(function, "decorator_list", []) if isinstance(item, ast.Call)
                 and script.name(item) == "hydra.main"), None)
    given = [getattr(argument(made, name, at), "value", None) if made is not None else None
             for at, name in enumerate(("config_path", "config_name"))]
    words = script.command.words if script.command is not None else ()
    name = next((word.partition("=")[2] for word in words if word.startswith("--config-name=")), given[1])
    if made is None or not isinstance(name, str):
        return None
    home = folder / str(given[0] or "")
    table = _composed(home, name.removesuffix(".yaml"), [word for word in words if not is_option(word)])
    for word in words if table is not None else ():
        key, joined, value = word.lstrip("+").partition("=")
        if joined and not is_option(word) and not word.startswith("~") and not (home / key).is_dir() and script.command:
            _override(table or Table(), key.split("."), Setting(number_or_text(value), script.command.place, word))
    return table


def _composed(home: Path, name: str, words: Sequence[str]) -> Table | None:
    """Return a config of Hydra with those that its list of defaults names; None where it is not there."""
    table = read_table(home / f"{name}.yaml", of_hydra=True)
    if table is None:
        return None
    defaults = table.entries.pop("defaults", None)
    for item in defaults.value if defaults is not None and isinstance(defaults.value, (list, tuple)) else ():
        group, chosen = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else ("", item)
        chosen = next((word.partition("=")[2] for word in words if group and word.startswith(f"{group}=")), chosen)
        if chosen == "_self_":
            continue
        plain = isinstance(chosen, str) and not group.startswith("override")
        inner = _composed(home / group, str(chosen), ()) if plain else None
        if inner is None:
            table.open = table.open or f"{group}: {chosen}"
        elif group:
            table.entries.setdefault(group, Setting(inner, Place(str(home / group)), f"{group}: {chosen}"))
        else:
            table.entries = {**inner.entries, **table.entries}
    return table


def _override(table: Table, keys: Sequence[str], setting: Setting) -> None:
    for key in keys[:-1]:
        inner = table.entries.get(key)
        if inner is None or not isinstance(inner.value, Table):
            return
        table = inner.value
    table.entries[keys[-1]] = setting


def read_table(file: Path, *, of_hydra: bool = False) -> Table | None:
    """Return the table of a YAML or JSON file; None where it has none. `of_hydra`: which fills in `${...}`."""
    with suppress(WrongUse, OSError):
        if file.is_file():
            text = read_text(file, "config")
            return _table(_marked(file, text), file, text.splitlines(), of_hydra)
    return None


@lru_cache(maxsize=64)
def _marked(file: Path, text: str) -> Marked:
    """Return a file's table, read once for each text: a project may name one config in many commands."""
    return read_marked(file, doubles=True)


def _table(found: Marked, path: Path, lines: list[str], of_hydra: bool) -> Table:
    def value_of(each: Marked) -> Any:
        if each.inner:
            return _table(each, path, lines, of_hydra)
        if of_hydra and isinstance(each.value, str):
            return Unread(each.value) if FILLED_BY_HYDRA.search(each.value) else number_or_text(
                each.value) if NUMBER.fullmatch(each.value) else each.value
        spelled = lines[each.line - 1] if isinstance(each.value, float) and path.suffix != ".json" and not of_hydra else ""
        return TextNumber(each.value) if TEXT_TO_PYYAML.search(spelled) else each.value
    return Table({name: Setting(value_of(each), Place(str(path), each.line), lines[each.line - 1].strip().rstrip(","))
                  for name, each in found.inner.items()}, file=str(path))
