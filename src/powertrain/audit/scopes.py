"""The names of a file by scope, as Python looks them up: what a function can see, and what has a value when it is read."""

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from powertrain.audit.script import Module, Script
from powertrain.audit.syntax import FunctionNode, Loop, ends, every, inside, last_name, parameters_of

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
NOTEBOOK = ("_In[", "# In[", "# %%", "get_ipython")         # what an exported notebook has: its cells may run in any order
KNOWN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__package__", "__spec__", "__path__", "get_ipython",
                                    "display", "_", "In", "Out"}
KEPT = 64                    # files of which it is known what they bind: several rules ask
OPENS = ("exec", "globals", "locals", "vars", "setattr")     # calls that may make names
NO_ERRORS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
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

    def _visit(self, node: ast.AST, chain: Chain) -> None:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.reads.append((node, chain))
            else:
                self.bound[chain[-1]].add(node.id)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            self.bound[chain[-1]].add(node.name)
            self._definition(node, chain)
        elif isinstance(node, ast.Lambda | COMPREHENSIONS):
            self.bound[node] = set()
            self._children(node, (*chain, node))
        elif isinstance(node, ast.NamedExpr):
            outer = [scope for scope in chain if not isinstance(scope, COMPREHENSIONS)]
            self.bound[outer[-1]].add(node.target.id)
            self._visit(node.value, chain)
        elif isinstance(node, ast.Global):
            self.bound[self._module] |= set(node.names)
        elif isinstance(node, ast.AnnAssign):
            for each in filter(None, (node.target, node.value)):
                self._visit(each, chain)
        else:
            self.bound[chain[-1]].update(bound_by(node))
            self._children(node, chain)

    def _definition(self, node: Any, chain: Chain) -> None:
        if isinstance(node, ast.ClassDef):
            outside = [*node.bases, *(item.value for item in node.keywords)]
        else:
            outside = [*node.args.defaults, *(item for item in node.args.kw_defaults if item is not None)]
        for each in (*node.decorator_list, *outside):
            self._visit(each, chain)
        self.bound[node] = {"__class__"} | (parameters_of(node) if not isinstance(node, ast.ClassDef) else set())
        for statement in node.body:
            self._visit(statement, (*chain, node))

    def _children(self, node: ast.AST, chain: Chain) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.arg):
                self.bound[chain[-1]].add(child.arg)
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

    binds: defaultdict[str, list[tuple[tuple[int, int], ast.AST, Chain]]] = field(default_factory=lambda: defaultdict(list))
    reads: list[tuple[ast.Name, Chain]] = field(default_factory=list)
    free: set[str] = field(default_factory=set)          # arguments, and names of other scopes

    def unset(self) -> Iterator[tuple[ast.Name, ast.AST]]:
        """Yield (name, what first binds it) of names that are read above all that binds them, where no loop comes back."""
        for node, loops in self.reads:
            made = self.binds[node.id] if node.id not in self.free else []
            here = (node.lineno, node.col_offset)
            if made and all(place > here and not set(around) & set(loops) for place, _, around in made):
                yield node, min(made, key=lambda one: one[0])[1]

    def visit(self, node: ast.AST, loops: Chain, at: tuple[int, int] | None = None) -> None:
        """Gather a node's part; `at` is where the names that it stores have their values."""
        if isinstance(node, FunctionNode | ast.ClassDef):
            self.binds[node.name].append(((node.lineno, 0), node, loops))
            return
        if isinstance(node, ast.Lambda | COMPREHENSIONS):
            return
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self.reads.append((node, loops))
            elif isinstance(node.ctx, ast.Store):
                self.binds[node.id].append((at or (node.lineno, node.col_offset), node, loops))
            return
        if isinstance(node, ast.Global | ast.Nonlocal):
            self.free |= set(node.names)
        for name in bound_by(node):
            self.binds[name].append(((getattr(node, "lineno", 0), 0), node, loops))
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
            order.free |= parameters_of(scope)
        for statement in scope.body:
            order.visit(statement, ())
        yield from order.unset()


def only_added_to(tree: ast.Module) -> Iterator[ast.Name]:
    """Yield the names of a file that `x += 1` reads and nothing else in the same function gives a value."""
    everywhere = {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names} | KNOWN
    files = [] if _taken_whole(tree) else [tree]
    for scope in (*files, *(node for node in ast.walk(tree) if isinstance(node, FunctionNode))):
        nodes = list(inside(scope))
        given = everywhere | {name for node in nodes for name in bound_by(node)}
        if isinstance(scope, FunctionNode):
            given |= parameters_of(scope)
        given |= {node.name for node in ast.walk(scope) if isinstance(node, FunctionNode | ast.ClassDef)}
        added = {node.target: node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(
            node.target, ast.Name)}
        given |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
                  and node not in added}
        yield from (target for target, name in added.items() if name not in given)


def means(script: Script, name: ast.Name, node: FunctionNode | ast.ClassDef) -> bool:
    """Return whether a name stands for this function or class: of its own file, or imported from there."""
    origin, module = script.origin(name), script.module(node)
    if isinstance(script.parents.get(node), ast.ClassDef):
        return False
    if origin is None or (module is script.module(name) and _hides(script, node)):
        return module is script.module(name) or (origin is None and module is not None and _in_star(script, name, module))
    parts = origin.split(".")
    return module is not None and len(parts) > 1 and parts[-1] == node.name and parts[-2] in (
        module.file.stem, module.file.parent.name)


def _in_star(script: Script, name: ast.Name, module: Module) -> bool:
    """Return whether the file of a name takes it from a module by `from module import *`, perhaps through others."""
    trees: dict[Path | None, ast.AST] = {None: own_tree(script), **{each.file: each.tree for each in script.modules}}
    around, seen = script.module(name), set[Path | None]()
    waiting = [around.file if around is not None else None]
    while waiting and name.id not in bound_names(trees[around.file if around is not None else None]):
        file = waiting.pop()
        if file not in seen and file in trees:
            seen.add(file)
            waiting += [script.project.get((each, "")) for each in _taken_whole(trees[file]) if (each, "") in script.project]
    return module.file in seen


def _hides(script: Script, node: FunctionNode | ast.ClassDef) -> bool:
    """Return whether a definition takes the place of what its file has imported above under the same name."""
    above = script.module(node)
    tree = above.tree if above is not None else script.tree
    imports = [each for each in every(ast.stmt, tree) if node.name in bound_by(each)]
    return node in tree.body and bool(imports) and all(each in tree.body and each.lineno < node.lineno for each in imports)


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
            more: list[ast.AST] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                more += filter(None, [script.called(node)])
            elif isinstance(node, ast.Attribute) and (there := script.of_module(node)) is not None:
                more += script.methods(there) if isinstance(there, ast.ClassDef) else [there]
            elif isinstance(node, ast.Name):
                kind, function = script.classes.get(node.id), script.functions.get(node.id)
                more += script.methods(kind) if kind is not None and means(script, node, kind) else []
                more += [function] if function is not None and means(script, node, function) else []
            waiting += [each for each in more if each not in entered]
            entered |= set(more)
    found |= entered
    return tuple(node for node in script.nodes if node in found)


@lru_cache(maxsize=KEPT)
def bound_names(tree: ast.AST) -> frozenset[str]:
    """Return every name that a file binds anywhere, in whatever scope."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, FunctionNode | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found |= set(node.names)
        found |= set(bound_by(node))
    return frozenset(found)


@lru_cache(maxsize=KEPT)
def names_of_class(kind: ast.ClassDef) -> frozenset[str]:
    """Return the names that the body of a class binds, its methods among them, without those of the methods' own variables."""
    body = ast.Module([ast.Pass() if isinstance(item, FunctionNode) else item for item in kind.body], [])
    return bound_names(body) | {item.name for item in kind.body if isinstance(item, FunctionNode)}


@lru_cache(maxsize=KEPT)
def given_to_others(script: Script, kind: ast.ClassDef | None) -> frozenset[str]:
    """Return the attributes that only classes which have nothing to do with an own one have, or give their objects."""
    above = {each.name: {last_name(base) for base in each.bases} for each in every(ast.ClassDef, script.tree)}
    near = {kind.name} if kind is not None else set[str]()
    grown = 0
    while len(near) > grown:
        grown = len(near)
        near |= {name for name, bases in above.items() if bases & near}.union(*(above.get(name, ()) for name in near))
    theirs = {name for each in script.classes.values() if each.name not in near for name in names_of_class(each)}
    others = {str(each.value) for each in every(ast.Constant, script.tree)}
    for node in (each for each in every(ast.Attribute, script.tree) if isinstance(each.ctx, ast.Store)):
        around = script.class_around(node)
        foreign = around is not None and around.name not in near and getattr(node.value, "id", "") == "self"
        (theirs if foreign else others).add(node.attr)
    own = {name for each in script.classes.values() if each.name in near for name in names_of_class(each)}
    return frozenset(theirs - others - own)


@lru_cache(maxsize=KEPT)
def is_open(tree: ast.AST) -> bool:
    """Return whether a file may have names that its text does not bind."""
    return bool(_taken_whole(tree)) or _opens(tree)


def _taken_whole(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in every(ast.ImportFrom, tree) if node.names[0].name == "*"]


def _opens(tree: ast.AST) -> bool:
    return any(last_name(call.func) in OPENS for call in every(ast.Call, tree))


def names_of(script: Script, tree: ast.Module, seen: tuple[ast.AST, ...] = ()) -> frozenset[str] | None:
    """Return every name that a file has: its own, modules' that it takes whole, Python's; None where it may have others."""
    if _opens(tree):
        return None
    listed = [each.value for each in every(ast.Assign, tree) if "__all__" in map(last_name, each.targets)]
    found = KNOWN | bound_names(tree) | {node.value for each in listed for node in every(ast.Constant, each)
                                 if isinstance(node.value, str)}     # which may be modules of a package
    files = {module.file: module.tree for module in script.modules}
    for node in _taken_whole(tree):
        other = files.get(script.project.get((node, ""), script.path))
        more = None if other is None else frozenset() if other in seen else names_of(script, other, (*seen, tree))
        if more is None:
            return None
        found |= more
    return found


@lru_cache(maxsize=2)
def own_tree(script: Script) -> ast.Module:
    return ast.Module([node for node in script.tree.body if not isinstance(node, ast.Module)], [])


def is_tried(script: Script, node: ast.AST) -> bool:
    """Return whether code is ready for an error of its own: one of the handlers around goes on, or only it has the code."""
    around = [node, *script.ancestors(node)]
    return any(isinstance(each, ast.ExceptHandler) or (isinstance(each, ast.Try) and around[at - 1] in each.body
               and not all(map(ends_the_run, each.handlers))) for at, each in enumerate(around))


def ends_the_run(handler: ast.ExceptHandler) -> bool:
    """Return whether an error still ends the run: the handler is for other errors, or ends in one or in `sys.exit`."""
    last = handler.body[-1]
    return (ends(last) and not isinstance(last, ast.Return)) or last_name(handler.type or last) in NO_ERRORS


def is_annotation(script: Script, node: ast.AST) -> bool:
    """Return whether a name only says a type, which Python may never look at."""
    inner = node
    for around in script.ancestors(node):
        if isinstance(around, ast.arg) or (isinstance(around, ast.AnnAssign) and inner is around.annotation) or (
                isinstance(around, FunctionNode) and inner is around.returns):
            return True
        inner = around
    return False


def trees_of(script: Script) -> list[ast.Module]:
    """Return the syntax of each file that can be asked for its names."""
    if any(mark in script.own_text for mark in NOTEBOOK):
        return []
    return [tree for tree in (own_tree(script), *(module.tree for module in script.modules)) if not is_open(tree)]
