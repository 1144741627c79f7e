"""YAML and JSON files as tables whose entries know their line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from powertrain.audit.subject import Setting
from powertrain.audit.values import Table
from powertrain.records.findings import Place

MOST_BYTES = 5_000_000                       # a config is smaller; data is not read here


def read_literal(path: Path) -> Table | None:
    """The file's mapping (JSON is YAML too); None where it is none, or cannot be parsed."""
    if path.stat().st_size > MOST_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    return _table(node, path, text.splitlines()) if isinstance(node, yaml.MappingNode) else None


def _table(node: yaml.MappingNode, path: Path, lines: list[str]) -> Table:
    table = Table()
    for key, item in node.value:
        line = key.start_mark.line
        table.entries[_value(key, path, lines)] = Setting(_value(item, path, lines), Place(str(path), line + 1),
                                                          lines[line].strip().rstrip(","))
    return table


def _value(node: yaml.Node, path: Path, lines: list[str]) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _table(node, path, lines)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, path, lines) for item in node.value]
    constructor = yaml.SafeLoader("")
    try:
        value = constructor.construct_object(node)
    except yaml.YAMLError:
        return str(node.value)
    return number(value)


def number(value: Any) -> Any:
    """YAML takes 2e-4 for text, because it wants 2.0e-4; every trainer means the number."""
    if isinstance(value, str) and value[:1].isdigit() and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value
