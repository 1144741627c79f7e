"""Questions about the nodes of a script's syntax that can be answered without the rest of the script."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

Node = TypeVar("Node", bound=ast.AST)
Value = TypeVar("Value")
TRAINING = re.compile(r"Trainer(?!Callback|State|Control)|(TrainingArguments|SFTConfig)$")       # calls that training needs
Loop = ast.For | ast.While | ast.AsyncFor
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
ENDING = ("exit", "quit", "sys.exit", "os._exit")    # calls that end the run
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def is_training(node: ast.AST) -> bool:             # a backward pass, or what makes a Trainer or its arguments, or asks one
    owner = owner_of(node) if isinstance(node, ast.Call) and last_name(node.func) == "fit" else None     # of Lightning
    return is_backward(node) or (owner is not None and "trainer" in last_name(owner).lower()) or (
        isinstance(node, ast.Call) and TRAINING.search(last_name(node.func)) is not None)


class kept_by_syntax(Generic[Value]):
    """A property that is worked out once for all launches of a script, which have the same syntax."""

    def __init__(self, work: Callable[[Any], Value]) -> None:
        self.work = work

    def __get__(self, script: Any, owner: Any = None) -> Value:
        if self.work not in script.kept:
            script.kept[self.work] = self.work(script)
        kept: Value = script.kept[self.work]
        return kept


def last_name(node: ast.AST) -> str:
    """Return `b` of `b` and `a.b`; "" for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument of a call by its name, or by its place if it has one."""
    named = next((item.value for item in call.keywords if item.arg == name), None)
    return call.args[place] if named is None and place is not None and len(call.args) > place >= 0 else named


def hides_arguments(call: ast.Call) -> bool:
    """Return whether a call has arguments that are not seen: `*rows` or `**settings`."""
    return any(isinstance(item, ast.Starred) for item in call.args) or any(item.arg is None for item in call.keywords)


def owner_of(call: ast.Call) -> ast.expr | None:
    """Return `model` of `model.train()`; None where what is called belongs to nothing."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def is_called(name: str, names: tuple[str, ...]) -> bool:
    return any(name == wanted or (wanted.startswith(".") and name.endswith(wanted)) for wanted in names)


def inside(node: ast.AST, but: Any = DEFINITIONS) -> Iterator[ast.AST]:
    """Yield all nodes under a node, except those of some types: the functions and classes that are only defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, but):
            yield child
            yield from inside(child, but)


def every(kind: type[Node], within: ast.AST) -> list[Node]:
    """Return all nodes of one type in a node, which may be itself. A module is gone through once: it is not changed later."""
    if isinstance(within, ast.Module):
        return list(_of_module(kind, within))            # type: ignore[arg-type]
    return [node for node in ast.walk(within) if isinstance(node, kind)]


@lru_cache(maxsize=256)
def _of_module(kind: type[Node], module: ast.Module) -> tuple[Node, ...]:
    return tuple(node for node in (ast.walk(module) if kind is ast.AST else _of_module(ast.AST, module))
                 if isinstance(node, kind))


def never_run(tree: ast.AST, *, in_cells: bool) -> list[ast.stmt]:
    """Return the statements that no run comes to: under `if False:`, and behind a `return`, `raise` or `sys.exit()`.

    `in_cells`: of a notebook, whose cells run one by one, so that an end is that of its cell alone.
    """
    found = [each for node in every(ast.If, tree) if isinstance(node.test, ast.Constant) and not node.test.value
             for each in node.body]
    for node in every(ast.AST, tree) if not in_cells else ():
        for block in (getattr(node, part, None) for part in ("body", "orelse", "finalbody")):
            if isinstance(block, list):      # in which modules of the project stand too
                end = next((at for at, each in enumerate(block) if ends(each)), len(block))
                found += [each for each in block[end + 1:] if isinstance(each, ast.stmt)]
    return found


def ends(statement: ast.AST) -> bool:
    """Return whether nothing behind a statement runs."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(statement, ast.Return | ast.Raise) or (isinstance(call, ast.Call) and ast.unparse(call.func) in ENDING)


def closure(first: list[FunctionNode], reach: Mapping[FunctionNode, set[FunctionNode]]) -> set[FunctionNode]:
    """Return these functions and all that they name, directly or through others."""
    waiting, found = list(first), set[FunctionNode]()
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.add(function)
            waiting += reach[function]
    return found


def member_of(files: list[tuple[Path, ast.Module]], dotted: str, name: str) -> FunctionNode | ast.ClassDef | None:
    """Return the function or class of a name in the one file that a dotted name of a module stands for."""
    end = "/" + dotted.strip(".").replace(".", "/")
    trees = [tree for file, tree in files if file.with_suffix("").as_posix().removesuffix("/__init__").endswith(end)]
    return next((item for tree in trees for item in tree.body if isinstance(item, FunctionNode | ast.ClassDef)
                 and item.name == name), None) if len(trees) == 1 else None


def names_in(node: ast.AST) -> set[str]:
    return {name.id for name in every(ast.Name, node)}


def is_constant(node: ast.AST | None, value: bool | None) -> bool:
    """Return whether a node is True, False or None, as asked for."""
    return isinstance(node, ast.Constant) and node.value is value


def is_true(given: ast.expr | None) -> bool:
    """Return whether an argument whose default is True is left out or True."""
    return given is None or is_constant(given, True)


def reads_of(name: str, within: ast.AST) -> list[ast.Name]:
    """Return where a node reads a name."""
    return [node for node in every(ast.Name, within) if node.id == name and isinstance(node.ctx, ast.Load)]


def targets_of(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def gives_name(node: ast.Assign, name: str) -> bool:
    """Return whether an assignment gives a plain name its value."""
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def parameters_of(function: FunctionNode | ast.Lambda) -> set[str]:
    """Return the names of all arguments that a function takes."""
    return {item.arg for item in every(ast.arg, function.args)}
