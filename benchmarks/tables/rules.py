"""The table of docs/audit.md: every rule of the audit, what it finds, how bad that is, and what it rests on."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from powertrain.audit.rules import RULES, Rule
from powertrain.records.findings import SEVERITIES
from tables.stored import markdown_table

COLUMNS = ("rule", "what it finds", "severity", "rests on")


def rows(studies: Path) -> str:
    """Of no study: a rule says itself what it rests on."""
    del studies
    rules = sorted(RULES, key=lambda rule: (SEVERITIES.index(severities(rule)[0]), rule.name))
    return markdown_table(COLUMNS, [(f"`{rule.name}`", _what(rule), " or ".join(severities(rule)), rule.rests_on)
                                    for rule in rules])


def severities(rule: type[Rule]) -> list[str]:
    """Those that its findings may have, the worst first: the first argument of `found` in its file."""
    tree = ast.parse(inspect.getsource(sys.modules[rule.__module__]))
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
             and node.func.attr == "found" for name in _names(tree, node.args[0])}
    return [name for name in SEVERITIES if name in found]


def _names(tree: ast.Module, node: ast.expr) -> Iterator[str]:
    """The severities in an expression, and in what is assigned to a variable of it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and inner.value in SEVERITIES:
            yield str(inner.value)
        elif isinstance(inner, ast.Name):
            for other in ast.walk(tree):
                targets = other.targets if isinstance(other, ast.Assign) else [getattr(other, "target", None)]
                if isinstance(other, (ast.Assign, ast.AnnAssign)) and other.value is not None and any(
                        isinstance(target, ast.Name) and target.id == inner.id for target in targets):
                    yield from (str(item.value) for item in ast.walk(other.value)
                                if isinstance(item, ast.Constant) and item.value in SEVERITIES)


def _what(rule: type[Rule]) -> str:
    return str(sys.modules[rule.__module__].__doc__).splitlines()[0].removesuffix(".")
