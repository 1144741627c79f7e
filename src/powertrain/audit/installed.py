"""What the installed libraries define, read from their sources as syntax: nothing of them is imported.

An answer is given only where it is sure. A module that makes names as it is loaded (`__getattr__`, compiled code) has none. TRL
need not be installed here: trl.stub has its names and arguments in the release that it says.
"""

import ast
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from powertrain.audit.scopes import bound_by
from powertrain.audit.subject import Circumstances
from powertrain.audit.syntax import every, last_name

LIBRARIES = frozenset({"transformers", "trl", "peft", "datasets", "accelerate", "evaluate", "huggingface_hub", "torch"})
PLAIN_BASES = frozenset({"object", "ABC", "Generic", "Protocol", "str"})
OF_ENUMS = frozenset({"name", "value"})
ENUMS = frozenset({"Enum", "StrEnum", "IntEnum"})
DEEPEST = 12                                 # of imports that hand a name on, and of classes that derive
OPEN_OF_STUBS = ("experimental",)            # whose modules a stub does not list
BY_FILES = "define_import_structure("        # by which transformers hands on the names of its models
TOKENIZERS = ("Tokenizer", "TokenizerFast")     # of which transformers 5 gives another class, if it knows the tokenizer
OF_MODELS = ("modeling_", "configuration_", "tokenization_")         # of files that were once beside those of all models
MADE_AS_LOADED = re.compile(r"globals\(\)\.update|globals\(\)\[(?!\"__file__\"\])|vars\(\)\[")


@dataclass(frozen=True)
class Defined:
    """A class or function of a library, in the file that it stands in."""

    path: Path
    node: ast.ClassDef | ast.FunctionDef


@cache
def root(library: str) -> Path | None:
    """Return the file of an installed library itself, or the stub of it that is kept here; None where there is neither."""
    with suppress(importlib.metadata.PackageNotFoundError):
        path = Path(str(importlib.metadata.distribution(library).locate_file(f"{library}/__init__.py")))
        if path.is_file():
            return path
    stub = Path(str(resources.files("powertrain") / "audit" / f"{library}.stub"))
    return stub if stub.is_file() else None


@cache
def release(library: str) -> tuple[int, ...] | None:
    """Return the release whose sources are read, as two numbers."""
    path = root(library)
    if path is None:
        return None
    kept = path.suffix == ".stub"
    text = path.read_text(encoding="utf-8").partition("\n")[0] if kept else importlib.metadata.version(library)
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def in_force(library: str, where: Circumstances) -> bool:
    """Return whether the release that is read here is the one that the subject would meet.

    Where the library's own release is not known, that of transformers decides: they are installed together.
    """
    read, asked = release(library), where.version(library)
    if read is None:
        return False
    if asked is None and library != "transformers":
        return in_force("transformers", where)
    return asked is not None and asked[:2] == read


@cache
def syntax(path: Path) -> ast.Module | None:
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        return ast.parse(path.read_text(encoding="utf-8"))
    return None


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a library's module; None where it has none, or is compiled."""
    library, *parts = module.split(".")
    first = root(library)
    if first is None or (parts and first.suffix == ".stub"):
        return None
    if not parts:
        return first
    return _source(first.parent.joinpath(*parts))


def _source(path: Path) -> Path | None:
    """Return the file of the module, or of the package, at a path without an ending."""
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def is_module(dotted: str) -> bool:
    return dotted.partition(".")[0] in LIBRARIES and file_of(dotted) is not None


@cache
def is_missing(module: str) -> bool:
    """Return whether a library surely has no such module."""
    library, *parts = module.split(".")
    first = root(library)
    if first is None or not parts or file_of(module) is not None:
        return False
    if first.suffix == ".stub":
        return parts[0] not in OPEN_OF_STUBS and ".".join(parts) not in _modules_of(first)
    above = ".".join((library, *parts[:-1]))
    if len(parts) > 1 and is_missing(above):
        return True
    path, parent = first.parent.joinpath(*parts), file_of(above)
    if path.is_dir() or any(path.parent.glob(f"{path.name}.*")) or parent is None:
        return False
    if parent.name != "__init__.py":         # a module that is no package has no modules in it
        return True
    names, is_open = names_in(parent)
    word, text = re.escape(parts[-1]), parent.read_text(encoding="utf-8")        # whose comments say words of no name
    said = parts[-1] in names or (is_open and re.search(rf"\b{word}\b", text)) or re.search(
        rf"[\"']{word}[\"']", first.read_text(encoding="utf-8"))
    return not said and "_fast" not in parts[-1]


@cache
def _modules_of(stub: Path) -> frozenset[str]:
    """Return the modules that a stub lists, without the library's name."""
    said = names_in(stub)[0]["__modules__"]
    assert isinstance(said, ast.Assign)
    return frozenset(ast.literal_eval(said.value).split())


@cache
def lacks(module: str, name: str) -> bool:
    """Return whether a library's module surely has no such name."""
    path = file_of(module)
    if name.endswith("ImageProcessorFast") or (path is not None and name.endswith(TOKENIZERS) and _knows_tokenizer(path, name)):
        return False
    if path is None or (module == "torch" and not name.startswith("_")):     # which is compiled, in good part
        return is_missing(module)
    names, is_open = names_in(path)
    if name in names or is_open or (not is_missing(f"{module}.{name}") and path.suffix != ".stub"):
        return False
    return not (module == "transformers" and not name.startswith(OF_MODELS) and _is_of_a_model(path.parent, name))


@cache
def is_not_in_star(module: str, name: str) -> bool:
    """Return whether `from transformers import *` leaves out a tokenizer that can still be imported by its name."""
    path = file_of(module) if module == "transformers" and name.endswith("TokenizerFast") else None
    return path is not None and not any(f'"{name}"' in file.read_text(encoding="utf-8") for file in (
        path, *(path.parent / "models").glob("*/tokenization_*.py")))


def _knows_tokenizer(path: Path, name: str) -> bool:
    """Return whether transformers, in whose folder a file lies, has a tokenizer or gives another one in its place."""
    plain, converters = name.removesuffix("Fast"), path.parent / "convert_slow_tokenizer.py"
    return not converters.is_file() or f'"{plain}"' in converters.read_text(encoding="utf-8") or _is_of_a_model(
        path.parent, plain)


@cache
def _is_of_a_model(folder: Path, name: str) -> bool:
    """Return whether a file of the models of transformers says a name, which it then hands on."""
    wanted = name.encode()
    bound = re.compile(rf"^(?:class |def )?{re.escape(name)}\b".encode(), re.MULTILINE)
    return any(bound.search(text) if file.parent.name == "auto" else True     # where names of tokenizers stand that are gone
               for file in (folder / "models").glob("*/*.py") if wanted in (text := file.read_bytes()))


@cache
def names_in(path: Path) -> tuple[Mapping[str, ast.AST], bool]:
    """Return the names that a module binds, each with what binds it, and whether there may be others."""
    tree = syntax(path)
    if tree is None:
        return {}, True
    found: dict[str, ast.AST] = {}
    text = path.read_text(encoding="utf-8")
    is_open = MADE_AS_LOADED.search(text) is not None or (BY_FILES in text and path != root("transformers"))
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_open = is_open or node.name == "__getattr__"
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            other = _imported_from(path, node)
            more, is_more_open = names_in(other) if other is not None and other != path else ({}, True)
            is_open = is_open or is_more_open
            found = {**dict.fromkeys(more, node), **found}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= dict.fromkeys(bound_by(node), node)
        else:
            found |= {inner.id: node for inner in every(ast.Name, node) if isinstance(inner.ctx, ast.Store)}
            texts = {inner.value: inner for inner in every(ast.Constant, node) if isinstance(inner.value, str)}
            found = {**{text: inner for text, inner in texts.items() if text.isidentifier()}, **found}
    return found, is_open


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements and those in their branches, but not those of functions and classes."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (each for each in _statements([*node.body, *node.orelse]) if not (     # lazy: found by their files
                isinstance(each, ast.ImportFrom) and each.names[0].name == "*"))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            yield from _statements([*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _imported_from(path: Path, node: ast.ImportFrom) -> Path | None:
    """Return the file of the module that a `from ... import` of a library's file names, if it is of a known library."""
    module = node.module or "__init__"
    if node.level:
        return _source(path.parents[node.level - 1].joinpath(*module.split(".")))
    return file_of(module) if module.partition(".")[0] in LIBRARIES else None


def defined(module: str, name: str) -> Defined | None:
    """Return the class or function of this name, wherever the module has it from; None where it cannot be followed."""
    path = file_of(module)
    return _defined(path, name) if path is not None else None


@cache
def _defined(path: Path, name: str, left: int = DEEPEST) -> Defined | None:
    names, _ = names_in(path)
    node = names.get(name)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return Defined(path, node)
    if not isinstance(node, ast.ImportFrom) or not left:
        return None
    other = _imported_from(path, node)
    if other is None or other == path:
        return None
    return _defined(other, next((item.name for item in node.names if (item.asname or item.name) == name), name), left - 1)


def _bases(kind: Defined) -> list[Defined | None]:
    """Return the classes that a class derives from; None for one that cannot be followed."""
    found: list[Defined | None] = []
    for base in kind.node.bases if isinstance(kind.node, ast.ClassDef) else ():
        name = last_name(base.value if isinstance(base, ast.Subscript) else base)
        if name not in PLAIN_BASES | ENUMS:
            # a stub names classes of another library too: TrainingArguments of transformers
            other = defined("transformers", name) if kind.path.suffix == ".stub" else None
            above = _defined(kind.path, name) or other
            found.append(above if above != kind else None)       # `class Own(other.Own)`
    return found


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(item) for item in node.decorator_list)


def parameters(kind: Defined | None) -> frozenset[str] | None:
    """Return the names of the arguments that a class or function takes; None where it takes any, or they are not known."""
    if kind is None:
        return None
    if isinstance(kind.node, ast.FunctionDef):
        return _of_function(kind.node)
    own = next((item for item in kind.node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if own is not None:
        return _of_function(own)
    bases = _bases(kind)
    if None in bases or any(isinstance(item, ast.FunctionDef) and item.name == "__new__" for item in kind.node.body):
        return None
    taken = [parameters(base) for base in bases]
    if not _is_dataclass(kind.node):
        return next(iter(taken), frozenset())
    stated = (item.target for item in kind.node.body if isinstance(item, ast.AnnAssign))
    fields = frozenset(target.id for target in stated if isinstance(target, ast.Name))
    known = [each for each in taken if each is not None]
    return fields.union(*known) if len(known) == len(taken) else None


def required(kind: Defined | None) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the arguments that a class, function or method has to have: those with a place in order, and the others."""
    node = kind.node if kind is not None else None
    own = node if isinstance(node, ast.FunctionDef) else next((
        item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None) if node else None
    if own is None or own.decorator_list or own.args.vararg is not None:
        return (), frozenset()
    names = [item.arg for item in (*own.args.posonlyargs, *own.args.args)]
    alone = {item.arg for item, default in zip(own.args.kwonlyargs, own.args.kw_defaults, strict=True) if default is None}
    given = names[:len(names) - len(own.args.defaults)]
    return tuple(given[1:] if names[:1] == ["self"] else given), frozenset(alone)


def _of_function(node: ast.FunctionDef) -> frozenset[str] | None:
    if node.args.kwarg is not None:
        return None
    texts = {inner.value for item in node.decorator_list for inner in every(ast.Constant, item)
             if isinstance(inner.value, str)}                # old names that are still taken
    return frozenset({item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)} | texts)


def members(kind: Defined | None, left: int = DEEPEST) -> frozenset[str] | None:
    """Return the attributes that objects of a class have of their own; None where it may have others."""
    if kind is None or not isinstance(kind.node, ast.ClassDef) or not left or (
            kind.path.suffix == ".stub" and not _is_dataclass(kind.node) and _listed(kind.node) is None):
        return None
    is_enum = any(ast.unparse(base).rpartition(".")[2] in ENUMS for base in kind.node.bases)
    found = {*(_listed(kind.node) or ()), *(OF_ENUMS if is_enum else ())}
    for item in ast.walk(kind.node):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(item.name)
        elif isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self":
            found.add(item.attr)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            found.add(item.id)
        elif isinstance(item, ast.ImportFrom):
            found |= {each.asname or each.name for each in item.names}
    if "__getattr__" in found and kind.node.name != "Module":
        return None
    for base in _bases(kind):
        more = members(base, left - 1)
        if more is None:
            return None
        found |= more
    return frozenset(found)


def _listed(node: ast.ClassDef) -> list[str] | None:
    """Return the attributes that a stub lists for the objects of a class; None where it lists none."""
    said = (item.value for item in node.body if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "__has__")
    return next((str(ast.literal_eval(value)).split() for value in said), None)


def places(kind: Defined | None) -> list[str] | None:
    """Return the arguments that a function, method or class takes in order; None where it takes any, or that is not known."""
    node = kind.node if kind is not None else None
    own = node if isinstance(node, ast.FunctionDef) else next((
        item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None) if node else None
    if own is None or own.decorator_list or own.args.vararg is not None or (kind is not None and kind.path.suffix == ".stub"):
        return None
    names = [item.arg for item in (*own.args.posonlyargs, *own.args.args)]
    return names[names[:1] == ["self"]:]


def method(kind: Defined | None, name: str, left: int = DEEPEST) -> Defined | None:
    """Return what a class's objects have under a method's name; None where it cannot be followed.

    A method that hands all that it takes on to the one above it counts as that one.
    """
    if kind is None or not isinstance(kind.node, ast.ClassDef) or not left:
        return None
    own = next((item for item in kind.node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)
    if own is None and kind.path.suffix == ".stub" and name in (_listed(kind.node) or ()):
        return None                          # which has one of its own
    if own is not None and f"super().{name}(*args, **kwargs)" not in ast.unparse(own):
        return Defined(kind.path, own)
    for base in _bases(kind):
        above = method(base, name, left - 1)
        has = members(base) if above is None else None
        if above is not None or has is None or name in has:
            return above
    return None


@cache
def gives(library: str, pattern: str, name: str) -> bool:
    """Return whether a file of a library, of those whose names fit a pattern, defines an attribute of a name anywhere."""
    first, word = root(library), re.escape(name.removesuffix("_id")).encode()
    there = re.compile(rb"(def |self\.|[\"'])" + word + rb"(_id)?\b|^ +" + word + rb"(_id)?\s*[:=]", re.MULTILINE)
    return first is None or any(there.search(file.read_bytes()) for file in first.parent.glob(pattern))
