"""YAML, JSON and assignments of Python as values that know the line they stand on. Nothing is executed or constructed.

PyYAML's nodes carry the marks, for JSON too: its comments and tabs, which YAML refuses, are blanked first. ruamel.yaml was
tried and not kept: it rewrites 6 to 50 lines of a public config that it only reads and writes, and its marks say no more.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from powertrain.audit.script import Setting
from powertrain.audit.values import Table
from powertrain.records import WrongUse
from powertrain.records.findings import Place

LARGEST_BYTES = 1 << 20                      # a config is a page of text, and of a script every value is followed
MOST_NODES = 20_000                          # with all aliases opened
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$")
# what documents and editors put into JSON: comments, tabs, a comma before a closing bracket; strings are left alone
_NOT_JSON = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|\t|,(?=\s*[}\]])', re.DOTALL)
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class Marked:
    """A value, and the line (from 1) of the key that it is set by."""

    value: Any                               # plain: None, bool, int, float, str, list, dict
    line: int
    inner: Mapping[str, Marked] = field(default_factory=dict)    # of a table


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-3` is a float, which PyYAML (1.1) reads as text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_text(path: Path, what: str) -> str:
    """Return the text of a script or config. Raises WrongUse if it is too large, is no text, or cannot be read."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise WrongUse(f"{path} has {path.stat().st_size:,} bytes; a {what} has at most {LARGEST_BYTES:,}: is it data?")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not UTF-8 text (byte {error.start}); an audit reads scripts and configs") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror or error}") from None


def read_marked(path: Path) -> Marked:
    """Return the table of a YAML or JSON file. Raises WrongUse if it cannot be read or holds something else."""
    text = read_text(path, "config")
    found = _read_yaml(_checked_json(text, path) if text.lstrip().startswith("{") else text, path)
    if not isinstance(found.value, dict):
        kind = "a list" if isinstance(found.value, list) else "a text" if isinstance(found.value, str) else \
            f"the value {shown(found.value)}"
        raise WrongUse(f"{path} is not a config: it holds {kind}, and not keys with values")
    return found


def read_assigned(path: Path) -> Marked:
    """Return the names that a Python file, or a class in it, sets to literals, as configs of document 004 and nanoGPT do."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError) as error:
        raise WrongUse(f"{path} cannot be read as Python: {error}") from None
    found: dict[str, Marked] = {}
    of_classes = (item for owner in tree.body if isinstance(owner, ast.ClassDef) for item in owner.body)
    for node in (*tree.body, *of_classes):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        known, value = _literal(getattr(node, "value", None))
        found |= {target.id: Marked(value, node.lineno) for target in targets if known and isinstance(target, ast.Name)}
    return Marked({name: each.value for name, each in found.items()}, 1, found)


def _literal(node: ast.expr | None) -> tuple[bool, Any]:
    """Return whether an expression is a literal, and its value."""
    try:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):        # nanoGPT's `5 * 8`
            factors = [_literal(side) for side in (node.left, node.right)]
            numbers = [value for known, value in factors if known and type(value) in (int, float)]
            return (True, numbers[0] * numbers[1]) if len(numbers) == 2 else (False, None)
        value = None if node is None else ast.literal_eval(node)
        return node is not None, printable(value) if isinstance(value, str) else value
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return False, None                   # only running it would tell


def read_literal(path: Path) -> Table | None:
    """Return the file's table as a script that reads it has it; None if it holds none or cannot be read."""
    try:
        found = read_marked(path)
        return _table(found, path, path.read_text(encoding="utf-8-sig").splitlines())
    except WrongUse:
        return None


def _table(found: Marked, path: Path, lines: list[str]) -> Table:
    return Table({name: Setting(_table(each, path, lines) if each.inner else each.value, Place(str(path), each.line),
                                lines[each.line - 1].strip().rstrip(",")) for name, each in found.inner.items()})


def shown(value: Any) -> str:
    """Return a value as a config writes it, on one short line."""
    text = printable(json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else
                      " ".join(value.split()))
    return text if len(text) <= 100 else f"{text[:97]}..."


def _checked_json(text: str, path: Path) -> str:
    """Return JSON as YAML reads it. Raises WrongUse if it is not JSON, comments and last commas aside."""
    for _ in range(2):                       # a comment may stand between the last comma and its bracket
        text = _NOT_JSON.sub(lambda found: found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0]), text)
    try:
        json.loads(text, strict=False)
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise WrongUse(f"{path}{line} is not JSON: {getattr(error, 'msg', error)}") from None
    return text


def _read_yaml(text: str, path: Path) -> Marked:
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return Marked({}, 1)
        return _from_node(node, node.start_mark.line + 1, _Loader(""), iter(range(MOST_NODES)), path)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        raise WrongUse(f"{path}{line} is not YAML: {problem}") from None


def _from_node(node: yaml.Node, line: int, loader: _Loader, budget: Iterator[int], path: Path) -> Marked:
    if next(budget, None) is None:
        raise WrongUse(f"{path} unfolds to more than {MOST_NODES:,} values; take its aliases out")
    if isinstance(node, yaml.MappingNode):
        _refuse_doubles(node, path)
        loader.flatten_mapping(node)         # `<<: *defaults`; what is merged comes first, and what is written here last
        inner = {_text(key): _from_node(value, key.start_mark.line + 1, loader, budget, path)
                 for key, value in node.value}
        return Marked({name: each.value for name, each in inner.items()}, line, inner)
    if isinstance(node, yaml.SequenceNode):
        return Marked([_from_node(item, line, loader, budget, path).value for item in node.value], line)
    return Marked(_scalar(node, loader), line)


def _refuse_doubles(node: yaml.MappingNode, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise WrongUse(f"{path}:{line} has a list or a table as a key; a config's keys are words")
        if name in lines:
            raise WrongUse(f"{path}:{line} sets {name} a second time (line {lines[name]} does so too), and only one of the two "
                           "would count; keep one")
        lines[name] = line


def printable(text: str) -> str:
    """Return the text with a replacement character for what no terminal can print and no YAML may hold."""
    return _UNPRINTABLE.sub("\ufffd", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _text(node: yaml.Node) -> str:
    return printable(str(node.value))


def _scalar(node: yaml.Node, loader: _Loader) -> Any:
    """Return a number, boolean, None or text; a date or a foreign tag stays text."""
    if str(node.tag).rpartition(":")[2] in ("null", "bool", "int", "float"):
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError, yaml.YAMLError):
            return _text(node)       # `!!int word`
    return _text(node)
