"""The table of docs/audit.md: every rule of the audit, what it finds, how bad that is, and what it rests on."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from powertrain.audit.rules import RULES
from powertrain.records.findings import SEVERITIES, Finding, Rule, Severity
from tables.stored import markdown_table

COLUMNS = ("rule", "what it finds", "severity", "rests on")


def rows(studies: Path) -> str:
    """Of no study: a rule says itself what it rests on."""
    del studies
    rules = sorted(RULES, key=lambda rule: (SEVERITIES.index(severities(rule)[0]), rule.name))
    return markdown_table(COLUMNS, [(f"`{rule.name}`", rule.about.removesuffix("."), " or ".join(severities(rule)),
                                     rule.rests_on) for rule in rules])


def severities(rule: Rule[Any]) -> list[str]:
    """Return those that its findings may have, the worst first: what stands first in its calls of `found`."""
    said = set(_severities(sys.modules[rule.ask.__module__], ast.parse(inspect.getsource(rule.ask))))
    return [name for name in SEVERITIES if name in said]


def _severities(module: ModuleType, code: ast.AST) -> Iterator[str]:
    """Yield the severities of a function's findings, of those that a helper makes or whose severity a helper chooses too."""
    for node in ast.walk(code):
        helper = vars(module).get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "found":
            names = {item.id for item in ast.walk(node.args[0]) if isinstance(item, ast.Name)}
            yield from _constants(node.args[0])
            yield from (name for other in ast.walk(code) if isinstance(other, (ast.Assign, ast.AnnAssign)) and other.value
                        and names & {item.id for item in ast.walk(other) if isinstance(item, ast.Name)
                                     and isinstance(item.ctx, ast.Store)} for name in _constants(other.value))
        elif inspect.isfunction(helper) and helper.__module__.startswith("powertrain.audit.rules"):
            returns, tree = inspect.get_annotations(helper, eval_str=True).get("return"), ast.parse(inspect.getsource(helper))
            if returns in (Finding, Severity):
                yield from _constants(tree) if returns is Severity else _severities(module, tree)


def _constants(node: ast.AST) -> Iterator[str]:
    return (str(item.value) for item in ast.walk(node) if isinstance(item, ast.Constant) and item.value in SEVERITIES)
