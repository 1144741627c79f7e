"""Patches of a script's code: a statement taken out, moved or put in, a call's argument added or changed."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from powertrain.audit.script import Script
from powertrain.records.findings import Edit

BLOCKS = ("body", "orelse", "finalbody")


def without(script: Script, *statements: ast.stmt) -> tuple[Edit, ...]:
    """Takes statements out; `pass` where a block would be empty. Nothing where one shares its line with another."""
    if not all(_is_alone(script, statement) for statement in statements):
        return ()
    edits, emptied = [], set()
    for statement in statements:
        block = block_of(script, statement)
        empties = all(other in statements for other in block) and id(block[0]) not in emptied
        if empties:
            emptied.add(id(block[0]))
        text = f"{indent(script, statement)}pass\n" if empties else ""
        edits.append(Edit(str(script.path), statement.lineno, last_line(statement), text))
    return tuple(edits)


def with_line(script: Script, statement: ast.stmt, text: str, *, after: bool = False) -> tuple[Edit, ...]:
    """A line of its own before a statement, or after it, indented as it is."""
    if not _is_alone(script, statement):
        return ()
    line = last_line(statement) + 1 if after else first_line(statement)
    ended = not after or script.lines[line - 2].endswith("\n")
    return (Edit(str(script.path), line, line - 1, f"{'' if ended else chr(10)}{indent(script, statement)}{text}\n"),)


def with_text(script: Script, node: ast.expr, text: str) -> tuple[Edit, ...]:
    """Another text in place of an expression, which has to stand in one line."""
    if node.end_lineno != node.lineno:
        return ()
    line = script.lines[node.lineno - 1]
    first, last = column(line, node.col_offset), column(line, node.end_col_offset or 0)
    return (Edit(str(script.path), node.lineno, node.lineno, line[:first] + text + line[last:]),)


def with_argument(script: Script, call: ast.Call, name: str, text: str) -> tuple[Edit, ...]:
    """A keyword argument added to a call as its last, or changed where the call has it."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return with_text(script, keyword.value, text)
    given: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not given:
        line = script.lines[(call.end_lineno or 0) - 1]
        at = column(line, call.end_col_offset or 0) - 1
        return (Edit(str(script.path), call.end_lineno or 0, call.end_lineno or 0, f"{line[:at]}{name}={text}{line[at:]}"),)
    last = max(given, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
    number = last.end_lineno or 0
    line = script.lines[number - 1]
    at = column(line, last.end_col_offset or 0)
    at += len(line[at:]) - len(line[at:].lstrip(")")) if isinstance(last, ast.Starred) else 0
    if number == (call.end_lineno or 0) or line[at:at + 1] in (",", ")"):
        return (Edit(str(script.path), number, number, f"{line[:at]}, {name}={text}{line[at:]}"),)
    return ()


def indented(script: Script, statements: Sequence[ast.stmt], by: str) -> tuple[Edit, ...]:
    """Statements that follow each other, and what stands between them, moved to the right."""
    first, last = first_line(statements[0]), last_line(statements[-1])
    text = "".join(by + line if line.strip() else line for line in script.lines[first - 1:last])
    return (Edit(str(script.path), first, last, text),)


def with_import(script: Script, module: str) -> tuple[Edit, ...]:
    """`import module` below the script's first import, where it is not imported yet."""
    if script.imported.get(module) == module:
        return ()
    first = next((node for node in script.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
                  and getattr(node, "module", "") != "__future__"), None)
    return with_line(script, first, f"import {module}") if first is not None else ()


def block_of(script: Script, statement: ast.stmt) -> list[ast.stmt]:
    """The statements among which one stands."""
    parent = script.parents[statement]
    for name in BLOCKS:
        block = getattr(parent, name, None)
        if isinstance(block, list) and statement in block:
            return block
    return [statement]


def indent(script: Script, statement: ast.stmt) -> str:
    line = script.lines[first_line(statement) - 1]
    return line[:len(line) - len(line.lstrip())]


def first_line(statement: ast.stmt) -> int:
    """The line in which it begins, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def column(line: str, offset: int) -> int:
    """Characters before a column that ast counts in bytes."""
    return len(line.encode()[:offset].decode())


def _is_alone(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement has its lines to itself: not `a; b`, not `if x: a`."""
    line = script.lines[first_line(statement) - 1]
    after = script.lines[last_line(statement) - 1].encode()[statement.end_col_offset or 0:].decode().strip()
    return not line.encode()[:statement.col_offset].decode().strip() and (not after or after.startswith("#"))
