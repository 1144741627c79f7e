"""A script together with the modules of its own project that it imports, as one text in which each line knows its file.

The text of every module stands below the script's own, and its syntax is a node of the script's tree. So rules, settings and
places read a project as they read one file. Python's rules of names hold: each module has its own imports and its own scope.

    train.py            from model import GPT       lines 1..40 of the text
    model.py            class GPT: ...              lines 41..90, places say model.py:1..50

A module is looked for where Python would: beside the script, in the folders that `sys.path` is told of, and in the project's
root, which is the nearest folder above that a project's files mark. Nothing outside the root is opened.
"""

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from powertrain.audit.parsing import imports, parsed, parsed_in_part, read_text
from powertrain.audit.script import Module, Script
from powertrain.records import WrongUse

MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "environment.yml")
WEAK_MARKS = ("README.md", "LICENSE", "ReadMe.md", "Readme.md", "readme.md", "README.rst", "README")     # which a part has too
HIGHEST = 4                                  # folders above the script in which a mark is looked for
MOST_MODULES = 40
MOST_BYTES = 1 << 20                         # of all modules together
NO_PROJECT = ("node_modules", "site-packages", "venv", "env", "__pycache__", "build", "dist", "wandb", "outputs")
# a checkout of these is no project of the script's: it uses them as a library
LIBRARIES = frozenset({"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "deepspeed", "unsloth", "axolotl"})


def root_of(path: Path) -> Path:
    """Return the folder of the script's project: the nearest above it that a project's files mark, else the script's own."""
    folder = path.resolve().parent
    above = [folder, *folder.parents][:HIGHEST]
    return next((one for marks in (MARKS, WEAK_MARKS) for one in above if any((one / mark).exists() for mark in marks)), folder)


def walked(folder: Path) -> Iterator[list[Path]]:
    """Yield the files of a folder, and of each folder in it that may hold code of a project; links are not followed."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NO_PROJECT)
        yield [Path(here) / name for name in sorted(names)]


def parse(path: Path, text: str | None = None, *, in_part: bool = False) -> Script:
    """Return a Python script, or another text in its place. Raises WrongUse where it cannot be read or parsed.

    `in_part`: a few lines that Python cannot parse are left out.
    """
    text = read_text(path, "script") if text is None else text
    try:
        tree, unparsed = parsed_in_part(text) if in_part else (parsed(text), "")
    except (MemoryError, RecursionError):                 # of the parser, which has a limit of its own
        raise WrongUse(f"{path} nests brackets or operators too deep for Python to parse; is it a program's output?") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise WrongUse(f"{path}{f':{line}' if line else ''} is not Python that this interpreter can parse "
                       f"({getattr(error, 'msg', error)}); correct the syntax first") from None
    return Script(path, text, tree, imports(tree), unparsed=unparsed)


def with_project(script: Script, root: Path | None = None) -> Script:
    """Return the script with the modules that it imports from its own project."""
    reading = _Reading((root or root_of(script.path)).resolve(), script.path)
    reading.enter(script.path.resolve(), script.tree, ())
    if not reading.modules:
        return replace(script, notes=tuple(reading.notes), root=reading.root)
    text, modules = script.text if script.text.endswith("\n") else script.text + "\n", []
    for module in reading.modules:
        above = text.count("\n")
        for node in ast.walk(module.tree):
            if hasattr(node, "lineno"):
                node.lineno, node.end_lineno = node.lineno + above, (node.end_lineno or node.lineno) + above   # type: ignore[attr-defined]
        text += module.text if module.text.endswith("\n") else module.text + "\n"
        modules.append(replace(module, first=above + 1))
    tree = ast.Module([*script.tree.body, *(each.tree for each in modules)], script.tree.type_ignores)     # type: ignore[list-item]
    return replace(script, text=text, tree=tree, modules=tuple(modules), notes=tuple(reading.notes),
                   project=reading.resolved, root=reading.root, unparsed=script.unparsed + reading.unparsed, kept={})


@dataclass
class _Reading:
    """The modules read so far, in the order in which their imports were found."""

    root: Path
    script: Path
    modules: list[Module] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)
    resolved: dict[tuple[ast.AST, str], Path] = field(default_factory=dict)
    told: list[Path] = field(default_factory=list)       # folders that `sys.path` is told of
    bytes_left: int = MOST_BYTES
    unparsed: str = ""

    def enter(self, path: Path, tree: ast.Module, stack: tuple[Path, ...]) -> None:
        """Read the modules that a file imports, and theirs."""
        self.seen.add(path)
        for target in self._targets(path, tree):
            if target in (*stack, path):
                circle = [*(*stack, path)[(*stack, path).index(target):], target]
                self.note(f"imports form a circle ({' -> '.join(map(self.shown, circle))}), and each file is read once; move "
                          "what both need into a file of its own")
            elif target not in self.seen:
                self._read(target, (*stack, path))

    def _read(self, path: Path, stack: tuple[Path, ...]) -> None:
        self.seen.add(path)
        if len(self.modules) >= MOST_MODULES or self.bytes_left <= 0:
            self.note(f"only the first {len(self.modules)} modules of the project are read; audit a script that imports fewer")
            return
        try:
            text = read_text(path, "module")
            tree, unparsed = parsed_in_part(text)
        except (WrongUse, SyntaxError, ValueError, MemoryError, RecursionError) as error:
            self.note(f"{self.shown(path)} cannot be read as Python ({getattr(error, 'msg', error)}), and is left out; correct "
                      "it first")
            return
        self.bytes_left, self.unparsed = self.bytes_left - len(text), self.unparsed + unparsed
        tree = ast.Module([node for node in tree.body if not (
            isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))], tree.type_ignores)
        given = self.script.parent / path.relative_to(self.script.resolve().parent) if path.is_relative_to(
            self.script.resolve().parent) else path
        self.modules.append(Module(given, path, text, tree, imports(tree)))
        self.enter(path, tree, stack)

    def _targets(self, path: Path, tree: ast.Module) -> Iterator[Path]:
        calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and "sys.path." in ast.unparse(each.func)]
        self.told += [base / str(node.value) for call in calls for node in ast.walk(call) if isinstance(node, ast.Constant)
                      for base in (path.parent, self.root) if str(node.value).strip(".") and str(node.value)[0] != "/"]
        for node in ast.walk(tree):
            for key, name, level in _named(node):
                found = self.find(name, level, path, quiet=bool(key and getattr(node, "module", None)))
                if found:
                    self.resolved[node, key] = found[-1]
                yield from found

    def find(self, name: str, level: int, path: Path, *, quiet: bool = False) -> list[Path]:
        """Return the files of a dotted name: the module's own, and the __init__.py of its packages.

        `quiet`: the name may be no module at all, so nothing is said where it leaves the folder.
        """
        above = [each for each in self.script.resolve().parents if each.is_relative_to(self.root)]
        bases = [*above, self.root, self.root / "src", *self.packages, *self.told, path.parent]      # the last, if it is told
        if not level and name.partition(".")[0] in LIBRARIES:
            return []
        if level:
            bases = [path.parents[min(level, len(path.parents)) - 1]]
            if not bases[0].is_relative_to(self.root):
                if not quiet:
                    self.note(f"{self.shown(path)} imports {'.' * level}{name}, which leaves the project's folder "
                              f"{self.root.name}/, and is not read; audit the folder above it")
                return []
        parts = [part for part in name.split(".") if part]
        for base in bases:
            found = _files(base, parts)
            if found and all(self._is_inside(each, path, name) for each in found):
                return found
        return []

    @cached_property
    def packages(self) -> list[Path]:
        """Return the folders of the project that can be installed, each of which may have a package of its own name."""
        found = sorted({file.parent for name in ("setup.py", "pyproject.toml") for file in self.root.glob(f"*/{name}")})
        return [*found, *(folder / "src" for folder in found)]

    def _is_inside(self, found: Path, path: Path, name: str) -> bool:
        inside = found.resolve().is_relative_to(self.root)
        if not inside:
            self.note(f"{self.shown(path)} imports {name}, a link that leaves the project's folder {self.root.name}/, and is "
                      "not read; audit the folder that it leads to")
        return inside

    def shown(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _named(node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield (name in the statement, dotted name, dots before it) of what an import may load.

    The name is "" for the module of `from module import name`; its names may be modules too.
    """
    if isinstance(node, ast.Import):
        yield from ((item.name, item.name, 0) for item in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.module:
            yield "", node.module, node.level
        yield from ((item.name, f"{node.module or ''}.{item.name}".strip("."), node.level) for item in node.names
                    if item.name != "*")


def _files(base: Path, parts: Sequence[str]) -> list[Path]:
    """Return a module's file and the __init__.py files on the way to it; empty where there is no such module."""
    found, here = [], base
    for part in parts[:-1]:
        here = here / part
        if (here / "__init__.py").is_file():
            found.append(here / "__init__.py")
    if not parts:
        return []
    last = here / parts[-1]
    file = last.with_suffix(".py") if last.with_suffix(".py").is_file() else last / "__init__.py"
    return [*found, file] if file.is_file() else []


def load(path: Path, text: str | None = None, root: Path | None = None) -> Script:
    """Return a script with its project. Raises WrongUse where the script itself cannot be read or parsed."""
    return with_project(parse(path, text, in_part=True), root)
