"""Follows a script statement by statement, as Python would, on what is known of its values; nothing of it is run.

Where a condition is not known, both branches are followed and what differs afterwards is unread. The body of a loop is followed
once, with everything that it changes unread. A call of the script's own function is followed into it with the arguments of that
call, so that a helper which builds an SFTConfig and returns it gives one. What is never called is followed at the end with its
parameters' defaults. The result is every call of foreign code, in the order reached, with its arguments.
"""

import ast
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain.audit import known_calls, values
from powertrain.audit.calling import Calls, Followed, Written
from powertrain.audit.script import Module, Script
from powertrain.audit.syntax import FunctionNode, every
from powertrain.audit.values import ClassValue, FunctionValue, Made, Scope, Table, Unread

MOST_STATEMENTS = 20_000                     # a script's helpers may call each other without end
REFUSING = ("Add", "Sub", "Div", "FloorDiv", "Lt", "LtE", "Gt", "GtE")    # of a text and a number
ADDING = ("append", "extend", "insert")
LONGEST_LOOP = 100                           # rounds that are followed one by one


def follow(script: Script) -> Followed:
    return _Follower(script).module()


class _Returned(Exception):
    """Control left the block: by return, raise, break or continue."""


class _Follower(Calls):
    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.defined: dict[ast.AST, FunctionValue] = {}      # functions in functions, with the names that they see
        self.scopes: dict[Path | None, Scope] = {}
        self.left = MOST_STATEMENTS

    def module(self) -> Followed:
        scope = Scope({"__name__": "__main__", "__file__": str(self.script.path)})
        self.scopes[None] = scope
        self.block([node for node in self.script.tree.body if not isinstance(node, ast.Module)], scope)
        for node in ast.walk(self.script.tree):
            if isinstance(node, FunctionNode) and node not in self.entered:
                module = self.script.module(node)
                if module is None or self.script.is_reached(node):
                    function = self.defined.get(node) or FunctionValue(node, self.of_module(module), self._owner(node))
                    self.enter(function, values.Arguments([], {}))
        return self.followed

    def of_module(self, module: Module | None) -> Scope:
        """Return the names of a module of the project, which is followed when it is first imported."""
        key = module.file if module is not None else None
        if module is not None and key not in self.scopes:
            self.scopes[key] = scope = Scope({"__name__": module.path.stem, "__file__": str(module.file)})
            stack, self.doubts = self.doubts, []
            with suppress(_Returned):
                self.block(module.tree.body, scope)
            self.doubts = stack
        return self.scopes[key]

    def _owner(self, node: FunctionNode) -> Any:
        """Return an instance for a method that no seen code calls; None for a plain function.

        It is the one that the script makes, with the attributes that only `__init__` sets, or one of which nothing is known.
        """
        parent = self.script.parents.get(node)
        static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
        if not isinstance(parent, ast.ClassDef) or static:
            return None
        made = self.instances.get(parent)
        if made is None or made.local is None:
            return Made(parent.name, parent)
        methods = [method for kind in made.local.lineage for name, method in kind.methods.items() if name != "__init__"]
        changed = {each.attr for method in methods for each in every(ast.Attribute, method.node)
                   if not isinstance(each.ctx, ast.Load)}
        kept = {name: value for name, value in made.attributes.items() if name not in changed}
        return replace(made, attributes=kept, named={})

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> bool:
        """Follow statements; return whether control leaves the block before its end."""
        for statement in body:
            self.left -= 1
            if self.left < 0:
                return True
            try:
                getattr(self, f"_{type(statement).__name__.lower()}", self._other)(statement, scope)
            except _Returned:
                return True
        return False

    def _other(self, statement: ast.stmt, scope: Scope) -> None:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                self.value(child, scope)

    def _expr(self, statement: ast.Expr, scope: Scope) -> None:
        self._other(statement, scope)
        self._forget(getattr(statement.value, "func", None), scope)

    def _forget(self, node: ast.AST | None, scope: Scope) -> None:
        """Leave open what a list holds that a method adds to, such as `rows.append`."""
        name = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) and node.attr in ADDING else ""
        if isinstance(scope.names.get(name), list):
            scope.names[name] = Unread(f"{name}, which is added to")

    def _return(self, statement: ast.Return, scope: Scope) -> None:
        value = None if statement.value is None else self.value(statement.value, scope)
        if self.returns:
            self.returns[-1].append(value)
        raise _Returned

    def _raise(self, statement: ast.Raise, scope: Scope) -> None:
        raise _Returned

    _break = _continue = _raise

    def _assign(self, statement: ast.Assign, scope: Scope) -> None:
        value = self.value(statement.value, scope)
        for target in statement.targets:
            self.bind(target, value, scope, statement)

    def _annassign(self, statement: ast.AnnAssign, scope: Scope) -> None:
        if statement.value is not None:
            self.bind(statement.target, self.value(statement.value, scope), scope, statement)

    def _augassign(self, statement: ast.AugAssign, scope: Scope) -> None:
        before, after = self.value(statement.target, scope), self.value(statement.value, scope)
        self.bind(statement.target, self._applied(statement, type(statement.op).__name__, before, after), scope, statement)

    def _applied(self, node: ast.AST, sign: str, left: Any, right: Any) -> Any:
        if {type(left), type(right)} in ({str, int}, {str, float}) and sign in REFUSING and not self.doubts:
            self.followed.refused.append(node)
        return super()._applied(node, sign, left, right)

    def bind(self, target: ast.expr, value: Any, scope: Scope, statement: Any) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
            self._remember(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            known = isinstance(value, (list, tuple)) and len(value) == len(target.elts)
            for i, item in enumerate(target.elts):
                self.bind(item, value[i] if known else Unread(self.script.words(statement)), scope, statement)
        elif isinstance(target, ast.Attribute):
            self._write(target, value, scope, statement)
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value, scope), self.value(target.slice, scope)
            setting = self.script.setting(statement, value)
            if isinstance(owner, Table) and isinstance(key, (str, int)):
                if key not in owner.entries and len(self.doubts) > owner.doubts:
                    owner.perhaps.add(key)
                owner.entries[key] = setting
            elif isinstance(owner, Table):
                owner.open = self.script.words(target)
            self.followed.items.append(Written(owner, key if isinstance(key, str) else "", setting, statement, (*self.doubts,)))

    def _dict(self, node: ast.Dict, scope: Scope) -> Table:
        table = super()._dict(node, scope)
        table.doubts = len(self.doubts)
        return table

    def missing(self, node: ast.Subscript, owner: Table, key: str) -> None:
        if not self.doubts and isinstance(node.ctx, ast.Load):
            self.followed.missing.append((node, owner.file, key))

    def _write(self, target: ast.Attribute, value: Any, scope: Scope, statement: Any) -> None:
        owner = self.value(target.value, scope)
        setting = self.script.setting(statement, value)
        if isinstance(owner, Made):
            owner.attributes[target.attr] = setting
            if owner.name.endswith(("Config", "Arguments")) or target.attr in owner.named:
                owner.named[target.attr] = setting
        self._remember(target.attr, value)
        self.followed.written.append(Written(owner, target.attr, setting, statement, (*self.doubts,)))

    def _if(self, statement: ast.If, scope: Scope) -> None:
        known = values.truth(self.value(statement.test, scope))
        self.followed.tests.setdefault(statement, set()).add(known)
        if known is not None and not (known and self._ends_the_run(statement.body[-1])):
            if self.block(statement.body if known else statement.orelse, scope):
                raise _Returned
            return
        before = dict(scope.names)
        self.doubts.append(self.script.words(statement.test))
        left_body = self.block(statement.body, scope)
        after_body = dict(scope.names)
        scope.names.clear()
        scope.names.update(before)
        left_else = self.block(statement.orelse, scope)
        self.doubts.pop()
        if left_body and left_else:
            raise _Returned
        if left_else:
            scope.names.update(after_body)
        elif not left_body:
            self._join(scope, after_body, before, self.script.words(statement.test))

    def _ends_the_run(self, statement: ast.stmt) -> bool:
        """Return whether a statement refuses the defaults, as `raise` and `sys.exit()` do: a real run has other values."""
        called = self.script.name(statement.value) if isinstance(statement, ast.Expr) else ""
        return isinstance(statement, ast.Raise) or called in ("sys.exit", "exit", "quit") or called.endswith("parser.error")

    def _join(self, scope: Scope, other: dict[str, Any], before: dict[str, Any], spelled: str) -> None:
        for name in {*scope.names, *other}:
            if name in scope.names and name in other:
                scope.names[name] = values.either(other[name], scope.names[name], spelled)
            elif name not in before:
                scope.names.setdefault(name, other.get(name))

    def _rounds(self, statement: ast.For | ast.While | ast.AsyncFor, scope: Scope) -> list[Any] | None:
        """Return what a short loop over a known table goes through, where each round may be followed by itself; else None."""
        plain = all(isinstance(node, (ast.Assign, ast.Expr, ast.If)) for node in ast.walk(statement)
                    if isinstance(node, ast.stmt) and node is not statement)
        call = statement.iter if isinstance(statement, ast.For) and plain and not statement.orelse else None
        method = call.func if isinstance(call, ast.Call) and not call.args else None
        if not isinstance(method, ast.Attribute) or method.attr != "items":
            return None
        table = self.value(method.value, scope)
        known = isinstance(table, Table) and not table.open and not table.perhaps and len(table.entries) <= LONGEST_LOOP
        return [(key, entry.value) for key, entry in table.entries.items()] if known else None

    def _loop(self, statement: ast.For | ast.While | ast.AsyncFor, scope: Scope) -> None:
        rounds = self._rounds(statement, scope)
        if rounds is not None and isinstance(statement, ast.For):
            for value in rounds:
                self.bind(statement.target, value, scope, statement)
                self.block(statement.body, scope)
            return
        self.followed.doubts[statement] = (*self.doubts,)
        self.followed.before.setdefault(statement, []).append(Scope(dict(scope.names), scope.outer))
        if not isinstance(statement, ast.While):
            self.value(statement.iter, scope)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not isinstance(
                    scope.names.get(node.id), (FunctionValue, ClassValue, Made)):
                scope.names[node.id] = Unread(f"{node.id}, which a loop changes")
            self._forget(node, scope)
        before = dict(scope.names)
        if isinstance(statement, ast.While):
            self.value(statement.test, scope)
        self.block(statement.body, scope)
        self._join(scope, before, before, "a loop")
        self.block(statement.orelse, scope)

    _for = _while = _asyncfor = _loop

    def _with(self, statement: ast.With | ast.AsyncWith, scope: Scope) -> None:
        for item in statement.items:
            value = self.value(item.context_expr, scope)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value, scope, statement)
        if self.block(statement.body, scope):
            raise _Returned

    _asyncwith = _with

    def _try(self, statement: ast.Try, scope: Scope) -> None:
        before = len(self.returns[-1]) if self.returns else 0
        left = self.block(statement.body, scope) or self.block(statement.orelse, scope)
        given = self.returns[-1][before:] if self.returns else []
        reads = left and any(isinstance(value, Table) and value.file for value in given)
        kept = len(self.returns[-1]) if self.returns else 0
        after = dict(scope.names)
        for handler in statement.handlers:
            if not self.block(handler.body, scope):
                self._join(scope, after, after, "an exception")
                left = False
            after = dict(scope.names)
        if reads:                                # the config; what a handler gives in its place is not what a run has
            del self.returns[-1][kept:]
        if self.block(statement.finalbody, scope) or left:
            raise _Returned

    def _functiondef(self, statement: FunctionNode, scope: Scope) -> None:
        scope.names[statement.name] = self.defined[statement] = FunctionValue(statement, scope)

    _asyncfunctiondef = _functiondef

    def _import(self, statement: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for name in statement.names:
            scope.names.pop(name.asname or name.name, None)      # Expressions finds it in Script.imported
            module = self._module(statement, name.name)
            if module is not None and (name.asname or "." not in name.name):
                scope.names[name.asname or name.name] = self.of_module(module)

    def _module(self, statement: ast.AST, name: str) -> Module | None:
        """Return the module of the project that an import names."""
        file = self.script.project.get((statement, name))
        return next((module for module in self.script.modules if module.file == file), None)

    def _importfrom(self, statement: ast.ImportFrom, scope: Scope) -> None:
        for name in statement.names:
            scope.names.pop(name.asname or name.name, None)
            own, inner = self._module(statement, ""), self._module(statement, name.name)
            names = self.of_module(own).names if own is not None else {}
            if name.name == "*":
                scope.names.update({key: value for key, value in names.items() if not key.startswith("_")})
            elif name.name in names:
                scope.names[name.asname or name.name] = names[name.name]
            elif inner is not None:
                scope.names[name.asname or name.name] = self.of_module(inner)

    def _classdef(self, statement: ast.ClassDef, scope: Scope) -> None:
        made = ClassValue(statement, scope, [self.value(base, scope) for base in statement.bases])
        inner = Scope({}, scope)
        for item in statement.body:
            if isinstance(item, FunctionNode):
                made.methods[item.name] = FunctionValue(item, scope)
            elif isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value is not None:
                target = item.targets[0] if isinstance(item, ast.Assign) else item.target
                if isinstance(target, ast.Name):
                    value = known_calls.field_default(self.value(item.value, inner))
                    inner.names[target.id] = value
                    made.fields[target.id] = self.script.setting(item, value)
        scope.names[statement.name] = made
