"""The names of a file by scope, as Python looks them up: what a function can see, and what has a value when it is read."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from powertrain.audit.script import FunctionNode, Loop, Script, inside

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Chain = tuple[ast.AST, ...]                  # the scopes around a node, the module first


class Scopes:
    """Every name of a file that is read, and those of them that no scope around binds."""

    def __init__(self, tree: ast.Module) -> None:
        self.bound: dict[ast.AST, set[str]] = {tree: set()}
        self.reads: list[tuple[ast.Name, Chain]] = []
        self._module = tree
        for statement in tree.body:
            self._visit(statement, (tree,))

    @property
    def lost(self) -> Iterator[ast.Name]:
        """Yield the names that are read where nothing that they can see binds them."""
        for node, chain in self.reads:
            seen = [scope for scope in chain if not isinstance(scope, ast.ClassDef) or scope is chain[-1]]
            if not any(node.id in self.bound[scope] for scope in seen):
                yield node

    def _bind(self, name: str, chain: Chain) -> None:
        self.bound[chain[-1]].add(name)

    def _visit(self, node: ast.AST, chain: Chain) -> None:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.reads.append((node, chain))
            else:
                self._bind(node.id, chain)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            self._bind(node.name, chain)
            self._definition(node, chain)
        elif isinstance(node, ast.Lambda | COMPREHENSIONS):
            inner = (*chain, node)
            self.bound[node] = set()
            self._children(node, inner)
        elif isinstance(node, ast.NamedExpr):
            outer = tuple(scope for scope in chain if not isinstance(scope, COMPREHENSIONS))
            self._bind(node.target.id, outer)
            self._visit(node.value, chain)
        elif isinstance(node, ast.Global):
            self.bound[self._module] |= set(node.names)
        elif isinstance(node, ast.AnnAssign):
            for each in (node.target, node.value):
                if each is not None:
                    self._visit(each, chain)
        else:
            for name in bound_by(node):
                self._bind(name, chain)
            self._children(node, chain)

    def _definition(self, node: Any, chain: Chain) -> None:
        outside = [*node.decorator_list]
        if isinstance(node, ast.ClassDef):
            outside += [*node.bases, *(item.value for item in node.keywords)]
        else:
            outside += [*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None)]
        for each in outside:
            self._visit(each, chain)
        inner = (*chain, node)
        self.bound[node] = {"__class__"}
        if not isinstance(node, ast.ClassDef):
            self.bound[node] |= {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
        for statement in node.body:
            self._visit(statement, inner)

    def _children(self, node: ast.AST, chain: Chain) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.arg):
                self._bind(child.arg, chain)
            else:
                self._visit(child, chain)


def bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds by itself: an import, an exception, a pattern."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((item.asname or item.name).partition(".")[0] for item in node.names)
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest


@dataclass
class _Order:
    """What one scope binds and reads, in the order of its text, each with the loops around."""

    binds: dict[str, list[tuple[tuple[int, int], ast.AST, Chain]]] = field(default_factory=dict)
    reads: list[tuple[ast.Name, Chain]] = field(default_factory=list)
    free: set[str] = field(default_factory=set)          # arguments, and names of other scopes

    def unset(self) -> Iterator[tuple[ast.Name, ast.AST]]:
        """Yield (name, what first binds it) of names that are read above all that binds them, where no loop comes back."""
        for node, loops in self.reads:
            made = self.binds.get(node.id, []) if node.id not in self.free else []
            here = (node.lineno, node.col_offset)
            if made and all(place > here and not set(around) & set(loops) for place, _, around in made):
                yield node, min(made, key=lambda one: one[0])[1]

    def bind(self, name: str, place: tuple[int, int], node: ast.AST, loops: Chain) -> None:
        self.binds.setdefault(name, []).append((place, node, loops))

    def visit(self, node: ast.AST, loops: Chain, at: tuple[int, int] | None = None) -> None:
        """Gather a node's part; `at` is where the names that it stores have their values."""
        if isinstance(node, FunctionNode | ast.ClassDef):
            self.bind(node.name, (node.lineno, 0), node, loops)
            return
        if isinstance(node, ast.Lambda | COMPREHENSIONS):
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.reads.append((node, loops))
            elif isinstance(node.ctx, ast.Store):
                self.bind(node.id, at or (node.lineno, node.col_offset), node, loops)
            return
        if isinstance(node, ast.Global | ast.Nonlocal):
            self.free |= set(node.names)
        for name in bound_by(node):
            self.bind(name, (getattr(node, "lineno", 0), 0), node, loops)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self.reads.append((node.target, loops))
        end = (node.end_lineno or 0, node.end_col_offset or 0) if isinstance(
            node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) else at
        inner = (*loops, node) if isinstance(node, Loop) else loops
        skipped = node.annotation if isinstance(node, ast.AnnAssign) else None
        for child in ast.iter_child_nodes(node):
            if child is not skipped:
                self.visit(child, loops if child is getattr(node, "iter", None) else inner, end)


def used_before(tree: ast.Module) -> Iterator[tuple[ast.Name, ast.AST]]:
    """Yield (name, what first binds it) of the names of a file that are read above all that gives them a value."""
    for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, FunctionNode))):
        order = _Order()
        if isinstance(scope, FunctionNode):
            order.free |= {item.arg for item in ast.walk(scope.args) if isinstance(item, ast.arg)}
        for statement in scope.body:
            order.visit(statement, ())
        yield from order.unset()


def means(script: Script, name: ast.Name, node: FunctionNode | ast.ClassDef) -> bool:
    """Return whether a name stands for this function or class: of its own file, or imported from there."""
    origin, module = script.origin(name), script.module(node)
    if isinstance(script.parents.get(node), ast.ClassDef):
        return False
    if origin is None:
        return module is script.module(name)
    parts = origin.split(".")
    return module is not None and len(parts) > 1 and parts[-1] == node.name and parts[-2] in (
        module.file.stem, module.file.parent.name)


@lru_cache(maxsize=2)                        # of both ways to start a script
def run_nodes(script: Script) -> tuple[ast.AST, ...]:
    """Return the syntax that a run comes to: the script's own, what its modules do as they are loaded, and what these call.

    `Script.nodes` takes any function of a name that is said somewhere; here a call has to mean it, or to make its class.
    """
    own = [node for node in script.nodes if isinstance(node, FunctionNode) and script.module(node) is None]
    waiting: list[ast.AST] = [script.tree, *(module.tree for module in script.modules), *own]
    found: set[ast.AST] = set()
    entered: set[ast.AST] = set(waiting)
    while waiting:
        for node in inside(waiting.pop(), FunctionNode | ast.Lambda):
            found.add(node)
            of_name = (script.classes.get(node.id), script.functions.get(node.id)) if isinstance(node, ast.Name) else ()
            named = [each for each in of_name if each is not None and isinstance(node, ast.Name) and means(script, node, each)]
            called = script.called(node) if isinstance(node, ast.Call) else None
            more: list[ast.AST] = [called] if called is not None and isinstance(node, ast.Call) and isinstance(
                node.func, ast.Attribute) else []
            for each in named:
                more += script.methods(each) if isinstance(each, ast.ClassDef) else [each]
            waiting += [each for each in more if each not in entered]
            entered |= set(more)
    found |= entered
    return tuple(node for node in script.nodes if node in found)
