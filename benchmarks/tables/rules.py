"""The table of docs/audit.md: every rule of the audit, what it finds, how bad that is, and what it rests on."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

from powertrain.audit.rules import RULES
from powertrain.records.findings import SEVERITIES, Rule
from tables.stored import markdown_table

COLUMNS = ("rule", "what it finds", "severity", "rests on")


def rows(studies: Path) -> str:
    """Of no study: a rule says itself what it rests on."""
    del studies
    rules = sorted(RULES, key=lambda rule: (SEVERITIES.index(severities(rule)[0]), rule.name))
    return markdown_table(COLUMNS, [(f"`{rule.name}`", rule.about.removesuffix("."), " or ".join(severities(rule)),
                                     rule.rests_on) for rule in rules])


def severities(rule: Rule[Any]) -> list[str]:
    """Return those that its findings may have, the worst first: the severities in the code of its function."""
    code = ast.parse(inspect.getsource(rule.ask))
    said = {node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    module = sys.modules[rule.ask.__module__]
    for name in {node.func.id for node in ast.walk(code) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}:
        helper = vars(module).get(name)              # `since(where)` chooses a severity, `_prompts` makes the finding
        if inspect.isfunction(helper) and helper.__module__ == module.__name__:
            said |= {node.value for node in ast.walk(ast.parse(inspect.getsource(helper))) if isinstance(node, ast.Constant)
                     and isinstance(node.value, str)}
    return [name for name in SEVERITIES if name in said]
