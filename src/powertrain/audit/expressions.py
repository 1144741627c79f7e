"""Expressions of a script -> what they can be known to be, without running anything of it.

What is not known is Unread (values.py), and contagious: nothing is guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

from powertrain.audit.arithmetic import FUNCTIONS, MOST, OF_PATHS, PATH_METHODS, TEXT_METHODS, WRONG, apply_operator
from powertrain.audit.script import Script, Setting
from powertrain.audit.values import (
    ENVIRONMENT,
    LAUNCHED,
    WORDS,
    Arguments,
    FunctionValue,
    Made,
    Reference,
    Scope,
    Table,
    Unread,
    attribute,
    beginning,
    either,
    is_known,
    known_word,
    plain,
    truth,
)

FOLLOWED = ("vars", "dict", "getattr", "setattr", "open", "isinstance")      # of Python's own that known_calls.py answers
JOINING = ("os.path.join", "pathlib.Path")
MOST_EVALUATED = 200_000                     # expressions: a function may call another one twice, and that one too


class Expressions:
    """Evaluates expressions in a scope."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._left = MOST_EVALUATED

    def call(self, called: Any, owner: Any, node: ast.Call, arguments: Arguments) -> Any:
        """Return what a call gives: not known, unless a subclass follows calls. `owner`: whose method is called."""
        return self.unread(node)

    def missing(self, node: ast.Subscript, owner: Table, key: str) -> None:
        """Note that a config is asked for a key that it does not have: nothing, unless a subclass does."""

    def unread(self, node: ast.AST, begins: str = "") -> Unread:
        return Unread(self.script.words(node), begins=begins)

    def value(self, node: ast.expr, scope: Scope) -> Any:
        reader = getattr(self, f"_{type(node).__name__.lower()}", None)
        self._left -= 1
        return self.unread(node) if reader is None or self._left < 0 else reader(node, scope)

    def attempt(self, node: ast.AST, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Return what a function of Python's own gives for values that are known; else, and where it raises, Unread."""
        with suppress(*WRONG):
            if all(map(is_known, [*values, *named.values()])):
                found = function(*values, **named)       # of texts up to MOST: no more than its square
                return self.unread(node) if isinstance(found, (str, list, tuple)) and len(found) > MOST else found
        return self.unread(node)

    def _constant(self, node: ast.Constant, scope: Scope) -> Any:
        large = isinstance(node.value, int) and node.value.bit_length() > MOST       # Python refuses to write its digits
        return self.unread(node) if large else node.value

    def _name(self, node: ast.Name, scope: Scope) -> Any:
        found = scope.find(node.id)
        origin = self.script.origin(node) or (node.id if node.id in FUNCTIONS or node.id in FOLLOWED else None)
        return Reference(origin) if origin and isinstance(found, Unread) and found.undefined else found

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        return self._of(self.value(node.value, scope), node)

    def _of(self, owner: Any, node: ast.Attribute) -> Any:
        if isinstance(owner, Reference):
            named = Reference(f"{owner.name}.{node.attr}")
            return self.words_given() if named == WORDS and self.script.command is not None else named
        found = attribute(owner, node.attr)
        if isinstance(owner, str) and node.attr in OF_PATHS:
            return self.attempt(node, OF_PATHS[node.attr], owner)
        return self.unread(node) if found is None else found.value

    def words_given(self) -> list[Any]:
        """Return sys.argv of the command that is looked at."""
        words = self.script.command.words if self.script.command is not None else ()
        return [self.script.path.name, *map(known_word, words)]

    def _list(self, node: ast.List | ast.Tuple | ast.Set, scope: Scope) -> Any:
        items: list[Any] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                inner = self.value(item.value, scope)
                if not isinstance(inner, (list, tuple)):
                    return self.unread(node)
                items += inner
            else:
                items.append(self.value(item, scope))
            if len(items) > MOST:
                return self.unread(node)
        return tuple(items) if isinstance(node, ast.Tuple) else items

    _tuple = _set = _list

    def _dict(self, node: ast.Dict, scope: Scope) -> Table:
        table = Table()
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if key is None:
                self.merge(table, value, self.script.words(item))
                continue
            name = self.value(key, scope)
            if isinstance(name, (str, int, bool)):
                spelled = f"{self.script.words(key)}: {self.script.words(item)}"
                table.entries[name] = Setting(value, self.script.place(key), spelled)
            else:
                table.open = self.script.words(key)
        return table

    def _dictcomp(self, node: ast.DictComp, scope: Scope) -> Any:
        """Return `{k: v for k, v in table.items() if ...}` of a table that is known."""
        made, each = Table(), node.generators[0]
        items = each.iter if len(node.generators) == 1 and isinstance(each.iter, ast.Call) else None
        method = items.func if items is not None and not items.args and isinstance(items.func, ast.Attribute) else None
        owner = self.value(method.value, scope) if method is not None and method.attr == "items" else None
        names = [item.id for item in getattr(each.target, "elts", ()) if isinstance(item, ast.Name)]
        if not isinstance(owner, Table) or len(names) != 2:
            return self.unread(node)
        made.open = owner.open
        for key, setting in owner.entries.items():
            inner = Scope({names[0]: key, names[1]: setting.value}, scope)
            held = [truth(self.value(test, inner)) for test in each.ifs]
            name = self.value(node.key, inner)
            if False in held:
                continue
            if not isinstance(name, (str, int)):
                return self.unread(node)
            made.entries[name] = replace(setting, value=self.value(node.value, inner))
            made.perhaps |= {name} if None in held or key in owner.perhaps else set()
        return made

    def merge(self, table: Table, value: Any, spelled: str) -> None:
        """Add `**value` to a table: its entries, and whether there may be more."""
        if isinstance(value, Table):
            table.entries.update(value.entries)
            table.open = table.open or value.open
            table.perhaps |= value.perhaps
        elif value is not None:
            table.open = table.open or spelled

    def _joinedstr(self, node: ast.JoinedStr, scope: Scope) -> Any:
        parts = list[str]()
        for part in node.values:
            value = self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope)
            if not is_known(value) or (isinstance(part, ast.FormattedValue) and part.format_spec is not None):
                return self.unread(node, "".join(parts) + beginning(value) * (not is_known(value)))
            parts.append(str(plain(value)))
        joined = "".join(parts)
        return joined if len(joined) <= MOST else self.unread(node)

    def _lambda(self, node: ast.Lambda, scope: Scope) -> Any:
        return FunctionValue(node, scope)

    def _binop(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(node.op, ast.BitOr) and isinstance(left, Table) and isinstance(right, Table):
            merged = Table(dict(left.entries), left.open, perhaps=set(left.perhaps))
            self.merge(merged, right, self.script.words(node.right))
            return merged
        if isinstance(node.op, ast.Div) and isinstance(left, str) and isinstance(right, str):
            return f"{left.rstrip('/')}/{right}"         # of paths: pathlib.Path keeps them as text
        found, begins = self._applied(node, type(node.op).__name__, left, right), beginning(left)
        if not isinstance(found, Unread) or not begins:
            return found
        joined = isinstance(node.op, ast.Div) and isinstance(left, str)
        return self.unread(node, begins.partition("%")[0] if isinstance(node.op, ast.Mod) else begins + "/" * joined)

    def _applied(self, node: ast.AST, sign: str, left: Any, right: Any) -> Any:
        if isinstance(left, Reference) != isinstance(right, Reference):
            return self.unread(node)
        return self.attempt(node, apply_operator, sign, left, right)

    def _unaryop(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return self.unread(node) if known is None else not known
        if isinstance(node.op, ast.USub) and isinstance(value, (int, float)):
            return -value
        return self.unread(node)

    def _boolop(self, node: ast.BoolOp, scope: Scope) -> Any:
        ends = isinstance(node.op, ast.Or)               # what an `or` stops at: something true
        for item in node.values[:-1]:
            value = self.value(item, scope)
            known = truth(value)
            if known is None:                            # `unknown and False` is False, `unknown or True` true
                others = [self.value(other, scope) for other in node.values]         # `unknown or "0"` may be either
                sure = any(each is True for each in others) if ends else False in map(truth, others)
                return ends if sure and isinstance(value, Unread) else self.unread(node)
            if known == ends:
                return value
        return self.value(node.values[-1], scope)

    def _compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        for sign, item in zip(node.ops, node.comparators, strict=True):
            right = self.value(item, scope)
            if isinstance(sign, (ast.Is, ast.IsNot)) and right is None and (
                    left.is_instance if isinstance(left, Made) else not isinstance(left, Unread)):
                answer: Any = (left is None) == isinstance(sign, ast.Is)
            elif right == ENVIRONMENT and left in LAUNCHED and self.script.launch is not None:
                answer = (left in self.script.launch) == isinstance(sign, ast.In)
            elif isinstance(sign, (ast.In, ast.NotIn)) and isinstance(right, Table) and is_known(left):
                answer = (self.unread(node) if right.open and left not in right.entries
                          else (left in right.entries) == isinstance(sign, ast.In))
            else:
                answer = self._applied(node, type(sign).__name__, left, right)
            if answer is not True:
                return answer
            left = right
        return True

    def _ifexp(self, node: ast.IfExp, scope: Scope) -> Any:
        known = truth(self.value(node.test, scope))
        if known is None:
            return either(self.value(node.body, scope), self.value(node.orelse, scope), self.script.words(node.test))
        return self.value(node.body if known else node.orelse, scope)

    def _namedexpr(self, node: ast.NamedExpr, scope: Scope) -> Any:
        scope.names[node.target.id] = value = self.value(node.value, scope)
        return value

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner = self.value(node.value, scope)
        key = self.value(node.slice, scope)
        if owner == ENVIRONMENT and self.script.launch is not None:
            return self.script.launch.get(str(key), self.unread(node))
        if isinstance(owner, Table) and is_known(key) and key in owner.entries:
            return owner.entries[key].value
        if isinstance(owner, Table) and isinstance(key, str) and owner.file and not owner.open:
            self.missing(node, owner, key)
        if isinstance(owner, (list, tuple, str)) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        return self.unread(node)

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        positional, table, opened = list[Any](), Table(), ""
        for item in node.args:
            value = self.value(item.value if isinstance(item, ast.Starred) else item, scope)
            if not isinstance(item, ast.Starred):
                positional.append(value)
            elif isinstance(value, (list, tuple)):
                positional += value
            else:
                opened = self.script.words(item)
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is None:
                self.merge(table, value, self.script.words(keyword.value))
            else:
                table.entries[keyword.arg] = Setting(value, self.script.place(keyword), self.script.words(keyword))
        named: dict[str, Setting] = {str(key): entry for key, entry in table.entries.items()}
        opened = opened or table.open
        method = node.func if isinstance(node.func, ast.Attribute) else None
        owner = self.value(method.value, scope) if method is not None else None
        called = self._of(owner, method) if method is not None else self.value(node.func, scope)
        if isinstance(called, Reference) and called.name in FUNCTIONS and not opened:
            known = list(takewhile(is_known, positional))
            if called.name in JOINING and len(known) < len(positional) and all(isinstance(each, str) for each in known):
                return self.unread(node, "".join(f"{each}/" for each in known) + beginning(positional[len(known)]))
            return self.attempt(node, FUNCTIONS[called.name], *positional, **{key: item.value for key, item in named.items()})
        if (isinstance(owner, str) and method is not None and method.attr in TEXT_METHODS
                and all(map(is_known, positional)) and not named):
            wide = method.attr == "format" and ":" in owner          # a width may ask for any amount of memory
            return self.unread(node) if wide else self.attempt(node, getattr(owner, method.attr), *positional)
        if isinstance(owner, str) and method is not None and method.attr in PATH_METHODS and not named:
            return self.attempt(node, PATH_METHODS[method.attr], owner, *positional)
        if isinstance(owner, str) and method is not None and method.attr in ("open", "read_text", "read_bytes"):
            return Made("open", node, [owner])
        return self.call(called, owner, node, Arguments(positional, named, opened, frozenset(map(str, table.perhaps))))
