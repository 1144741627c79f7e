"""The ways to start a script that an audit looks at: as it stands, by torchrun, by the project's commands, with its configs."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from powertrain.audit.command_lines import read_table
from powertrain.audit.commands import commands, project_files, shown, text_of
from powertrain.audit.configs import SUFFIXES
from powertrain.audit.known_calls import FROM_A_FILE, READERS
from powertrain.audit.scopes import own_tree
from powertrain.audit.script import Command, Script
from powertrain.audit.syntax import FunctionNode, argument, every, inside, is_training, last_name
from powertrain.records.findings import Place

NOTEBOOK = ".ipynb"
ALONE: dict[str, str] = {}
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
WITHOUT, WITH = "started without torchrun", "started with torchrun"
SPREADING = ("torchrun", "accelerate", "deepspeed", "torch.distributed")     # beginnings of words that start processes
OF_CONFIGS = ("config", "cfg")               # words of an option that names a config
MOST = 2                                     # commands of a project that are followed
SAID = 0.6                                   # share of a config's keys that the script reads, so that it is its own


def launches(script: Script) -> Iterator[tuple[str, Script]]:
    """Yield the ways to start a script, each with its words; "" for the one that nothing more is said of."""
    if says_launch(script):
        yield from ((said, replace(script, launch=launch)) for said, launch in ((WITHOUT, ALONE), (WITH, TORCHRUN)))
    else:
        yield "", script
    told = {command.words: command for command in reversed(commands(script)) if command.words}
    started = [*reversed(told.values())] or [*_with_config(script)]
    for command in started[:MOST]:
        spread = any(word.rpartition("/")[2].startswith(SPREADING) for word in command.starter)
        launch = None if not says_launch(script) else TORCHRUN if spread else ALONE
        root = f"{(script.root or Path()).resolve()}/"
        place = f"as in {command.place}" if command.starter else f"with {command.place.file}"
        yield f"started {place.replace(root, '')}", replace(script, command=command, launch=launch)


def says_launch(script: Script) -> bool:
    """Return whether the code asks how it was launched."""
    return any(f'"{name}"' in script.text or f"'{name}'" in script.text for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")) or \
        ".is_initialized()" in script.text


def user_of(script: Script) -> Path | None:
    """Return the one script of the project that imports a script which trains in functions alone, and starts none of them."""
    own, stem = own_tree(script), re.escape(script.path.stem)
    defined = {node.name for node in own.body if isinstance(node, FunctionNode | ast.ClassDef)}
    starts = (is_training(node) or (isinstance(node, ast.Call) and last_name(node.func) in defined) for node in inside(own))
    if "__main__" in script.own_text or not defined or script.path.suffix != ".py" or any(starts) or commands(script):
        return None
    said = re.compile(rf"^\s*\"?(from\s+[\w.]*\b{stem}\s+import|(from\s+[\w.]+\s+)?import\s.*\b{stem}\b)", re.M)
    root = (script.root or script.path.parent).resolve()
    users = [file for file in project_files(script) if file.suffix in (".py", NOTEBOOK) and not any(
        part.startswith(("__init__", "test")) for part in file.relative_to(root).parts) and file != script.path.resolve()
        and said.search(text_of(file)) and (file.parent == script.path.resolve().parent or not (
            file.parent / script.path.name).is_file())]          # else Python takes the one beside it
    found = [file for file in users if file.suffix == ".py"] or users
    return Path(shown(script, found[0])) if len(found) == 1 else None


def _with_config(script: Script) -> Iterator[Command]:
    """Yield, for a script that takes its config by an option and has none by default, the project's config that fits best."""
    taken: list[tuple[tuple[str, ...], ast.expr | None]] = [
        ((flag.value,), argument(call, "default")) for call in script.calls(".add_argument", "click.option", "typer.Option")
        for flag in call.args if isinstance(flag, ast.Constant) and isinstance(flag.value, str)
        and flag.value.startswith("--") and any(word in flag.value for word in OF_CONFIGS)]
    if not taken and script.has_call(".parse_args_and_config"):
        taken = [(("--config",), None)]
    elif not taken and "sys.argv[1]" in script.text:
        taken = [((), None)]
    root = (script.root or script.path.parent).resolve()
    reads = script.has_call(*READERS, *(f".{name}" for name in (*FROM_A_FILE, "parse_args_and_config")))
    if len(taken) != 1 or not reads or _is_there(script, root, taken[0][1]):
        return
    said = {str(node.value) for node in every(ast.Constant, script.tree)} | {
        node.attr for node in every(ast.Attribute, script.tree)}
    best, fits = None, (False, 1)
    for file in project_files(script):
        table = read_table(file) if file.suffix in SUFFIXES and text_of(file) else None       # not of large files
        keys = [*table.entries] if table is not None else []
        here = (script.path.stem in file.stem, len(said.intersection(keys)))
        if here > fits and here[1] > max(1, SAID * len(keys)):
            best, fits = file, here
    if best is not None:
        yield Command(Place(shown(script, best), 1), (*taken[0][0], best.relative_to(root).as_posix()), ())


def _is_there(script: Script, root: Path, default: ast.expr | None) -> bool:
    """Return whether the default of an option is a file of the project."""
    name = getattr(default, "value", None)
    return isinstance(name, str) and any((folder / name).is_file() for folder in (script.path.parent, root))
