"""YAML and JSON as values that know the line they stand on.

YAML is composed into nodes by the safe loader, whose marks say where each of them begins; nothing is constructed but text,
numbers, lists and tables. JSON is read by a scanner of its own, because YAML would refuse its tabs, and because documents
show it with `//` comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from powertrain.records import WrongUse

LARGEST_BYTES = 1 << 20                      # a config is a page of text; aliases can make a larger one explode
MOST_NODES = 20_000                          # with all aliases opened

_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$")
_BLANK = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[-+]?[0-9][0-9.eE+-]*|true|false|null')


@dataclass(frozen=True)
class Marked:
    """A value, and the line (from 1) of the key that it is set by."""

    value: Any                               # plain: None, bool, int, float, str, list, dict
    line: int
    inner: Mapping[str, Marked] = field(default_factory=dict)    # of a table
    items: tuple[Marked, ...] = ()                               # of a list

    def at(self, dotted: str) -> Marked | None:
        """The value under a dotted key, if there is one."""
        found: Marked | None = self
        for part in dotted.split("."):
            found = found.inner.get(part) if found is not None else None
        return found


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-3` is a float, which PyYAML (1.1) reads as text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def read_marked(path: Path) -> Marked:
    """The table that a YAML or JSON file holds. Raises WrongUse where it cannot be read or holds something else."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise WrongUse(f"{path} has {path.stat().st_size:,} bytes; a config has at most {LARGEST_BYTES:,}: is it data?")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not UTF-8 text (byte {error.start}); an audit reads scripts and configs") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror or error}") from None
    found = json_marked(text, path) if text.lstrip().startswith("{") else yaml_marked(text, path)
    if not isinstance(found.value, dict):
        raise WrongUse(f"{path} is not a config: it holds {_kind(found.value)}, and not keys with values")
    return found


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else f"the value {shown(value)}"


def shown(value: Any) -> str:
    """A value as a config writes it, on one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 100 else f"{text[:97]}..."


# ------------------------------------------------------------------------------------------------ YAML


def yaml_marked(text: str, path: Path) -> Marked:
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return Marked({}, 1)
        return _from_node(node, node.start_mark.line + 1, _Loader(""), iter(range(MOST_NODES)), path)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where else ""
        raise WrongUse(f"{path}{line} is not YAML: {getattr(error, 'problem', None) or error}") from None


def _from_node(node: yaml.Node, line: int, loader: _Loader, budget: Iterator[int], path: Path) -> Marked:
    if next(budget, None) is None:
        raise WrongUse(f"{path} unfolds to more than {MOST_NODES:,} values; take its aliases out")
    if isinstance(node, yaml.MappingNode):
        _refuse_doubles(node, path)
        loader.flatten_mapping(node)         # `<<: *defaults`; what is merged comes first, and what is written here last
        inner = {str(key.value): _from_node(value, key.start_mark.line + 1, loader, budget, path) for key, value in node.value}
        return Marked({name: each.value for name, each in inner.items()}, line, inner)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_from_node(item, item.start_mark.line + 1, loader, budget, path) for item in node.value)
        return Marked([item.value for item in items], line, items=items)
    return Marked(_scalar(node, loader), line)


def _refuse_doubles(node: yaml.MappingNode, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise WrongUse(f"{path}:{line} sets {name} a second time (line {lines[name]} does so too), and only one of the two "
                           "would count; keep one")
        lines[name] = line


def _scalar(node: yaml.Node, loader: _Loader) -> Any:
    """Numbers, booleans, nothing and text; a date or a foreign tag stays the text that it is."""
    kind = str(node.tag).rpartition(":")[2]
    if kind not in ("null", "bool", "int", "float"):
        return node.value
    try:
        return loader.construct_object(node)
    except (ValueError, yaml.YAMLError):
        return node.value


# ------------------------------------------------------------------------------------------------ JSON


def json_marked(text: str, path: Path) -> Marked:
    """JSON, with comments if there are any, each key with its line."""
    try:
        found, end = _json_value(text, _skip(text, 0), 1, 0)
    except _NotJson as error:
        line = text.count("\n", 0, error.place) + 1
        raise WrongUse(f"{path}:{line} is not JSON: {error}") from None
    if _skip(text, end) != len(text):
        raise WrongUse(f"{path}:{text.count(chr(10), 0, end) + 1} is not JSON: something follows the closing brace")
    return found


class _NotJson(Exception):
    def __init__(self, why: str, place: int):
        super().__init__(why)
        self.place = place


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found
    return found.end()


def _json_value(text: str, at: int, line: int, depth: int) -> tuple[Marked, int]:
    """(the value, where it ends)."""
    if depth > 50:
        raise _NotJson("tables are nested more than 50 deep", at)
    if text.startswith("{", at):
        return _json_table(text, at, line, depth)
    if text.startswith("[", at):
        return _json_list(text, at, line, depth)
    found = _TOKEN.match(text, at)
    try:
        if found is None:
            raise ValueError
        return Marked(json.loads(found.group(), strict=False), line), found.end()
    except ValueError:
        seen = text[at:at + 20].splitlines()
        raise _NotJson(f"there is no value at {seen[0]!r}" if seen else "it ends too early", at) from None


def _json_table(text: str, at: int, line: int, depth: int) -> tuple[Marked, int]:
    inner: dict[str, Marked] = {}
    at = _skip(text, at + 1)
    while not text.startswith("}", at):
        here = text.count("\n", 0, at) + 1
        name, end = _json_value(text, at, here, depth + 1)
        colon = _skip(text, end)
        if not isinstance(name.value, str) or not text.startswith(":", colon):
            raise _NotJson("a key in quotes and a colon belong here", at)
        if name.value in inner:
            raise _NotJson(f"{name.value} is set a second time (line {inner[name.value].line} does so too); keep one", at)
        inner[name.value], end = _json_value(text, _skip(text, colon + 1), here, depth + 1)
        at = _next_item(text, end, "}")
    return Marked({name: each.value for name, each in inner.items()}, line, inner), at + 1


def _json_list(text: str, at: int, line: int, depth: int) -> tuple[Marked, int]:
    items: list[Marked] = []
    at = _skip(text, at + 1)
    while not text.startswith("]", at):
        item, end = _json_value(text, at, text.count("\n", 0, at) + 1, depth + 1)
        items.append(item)
        at = _next_item(text, end, "]")
    return Marked([item.value for item in items], line, items=tuple(items)), at + 1


def _next_item(text: str, at: int, close: str) -> int:
    at = _skip(text, at)
    if text.startswith(",", at):
        return _skip(text, at + 1)
    if not text.startswith(close, at):
        raise _NotJson(f"a comma or {close} belongs here", at)
    return at
