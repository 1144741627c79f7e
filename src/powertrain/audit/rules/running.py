"""Rules on plain Python that ends a run: names out of reach, arguments that are refused, attributes that are not there."""

import ast
from collections import Counter
from functools import lru_cache
from pathlib import Path

from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.scopes import (
    KNOWN,
    Scopes,
    bound_names,
    is_annotation,
    is_tried,
    means,
    run_nodes,
    trees_of,
    used_before,
)
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, inside, last_name


@code_rule
def names_out_of_reach(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The code uses a name that only another function gives a value."""
    trees, reached = trees_of(script), set(run_nodes(script))
    for tree in trees:
        bound = bound_names(tree)
        guarded = any(module.tree is tree and "__main__" in module.text for module in script.modules)
        lost = [node for node in Scopes(tree).lost if node in reached and node.id in bound and node.id not in KNOWN
                and node.id not in script.unparsed and not is_tried(script, node)
                and not is_annotation(script, node)] if not guarded else []
        if lost:
            yield found("critical", *{node.id: node for node in reversed(lost)}.values(),
                        names=", ".join(dict.fromkeys(node.id for node in lost)))


@code_rule_once
def used_before_given(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A name is used above the line that first gives it a value."""
    trees, reached = trees_of(script), set(run_nodes(script))
    for tree in trees:
        for node, later in used_before(tree):
            if node in reached and node.id not in KNOWN and node.id not in script.unparsed and not is_tried(script, node):
                yield found("critical", node, later, name=node.id)


@code_rule_once
def rank_as_device(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The number of the process among all is taken for the number of its GPU."""
    if script.says("LOCAL_RANK", "local_rank", "local_process_index"):
        return
    for call in script.calls("torch.cuda.set_device", "torch.device", ".to"):
        whole = script.name(call) == "torch.cuda.set_device"
        if not call.args or not (whole or isinstance(call.args[0], ast.JoinedStr | ast.Name)):
            continue
        behind = script.behind(call.args[0])
        ranks = [node for node in behind if (isinstance(node, ast.Call) and last_name(node.func) == "get_rank") or (
            isinstance(node, ast.Constant) and node.value == "RANK")]
        divided = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in behind)
        if ranks and not divided:
            yield found("moderate", call, ranks[0])


@code_rule
def arguments_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call of the project's own function or class has other arguments than it takes."""
    project = _own(script)
    for call in run_nodes(script):
        own = project.called(call) if isinstance(call, ast.Call) else None
        if own is None or not isinstance(call, ast.Call) or is_tried(script, call) or any(
                isinstance(item, ast.Starred) for item in call.args):
            continue
        name, spec, bound = own
        names = [item.arg for item in (*spec.posonlyargs, *spec.args)][bound:]
        allowed = {*names, *(item.arg for item in spec.kwonlyargs)}
        refused = [str(item.arg) for item in call.keywords if item.arg and spec.kwarg is None and item.arg not in allowed]
        extra = len(call.args) > len(names) and spec.vararg is None
        required = names[len(call.args):max(len(call.args), len(names) - len(spec.defaults))]
        of_class = bound == 1 and isinstance(call.func, ast.Name)        # missing_arguments says it of functions
        lacks = [each for each in required if each not in {item.arg for item in call.keywords}] if of_class and all(
            item.arg for item in call.keywords) else []
        if refused or extra or lacks:
            said = f"does not take {', '.join(refused)}" if refused else f"needs {', '.join(lacks)}" if lacks else (
                f"takes {len(names)} arguments, and gets {len(call.args)}")
            yield found("critical", call.func, name=name, said=said)


class _Own:
    """The project's own functions and classes, as far as their names are bound once in the whole project."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.times: Counter[str] = Counter()             # how often each name is bound, by any statement but an import
        self.definitions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, FunctionNode | ast.ClassDef):
                self.times[node.name] += 1
                self.definitions[node.name] = node
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.times[node.id] += 1
            elif isinstance(node, ast.arg):
                self.times[node.arg] += 1

    def called(self, call: ast.Call) -> tuple[str, ast.arguments, int] | None:
        """Return (name, arguments, how many of them are bound) of the function or class that a call surely means."""
        if isinstance(call.func, ast.Name):
            name, node = call.func.id, self.definition(call.func)
            if isinstance(node, ast.ClassDef):
                spec = self._made_with(node)
                return (name, spec, 1) if spec is not None else None
            return (name, node.args, 0) if node is not None and not node.decorator_list else None
        function = self.method(call)
        kind = self.script.parents.get(function) if function is not None else None
        if function is not None and isinstance(kind, ast.ClassDef) and not function.decorator_list and function.args.args[:1] \
                and function.args.args[0].arg == "self":
            return f"{kind.name}.{function.name}", function.args, 1
        return None

    def method(self, call: ast.Call) -> FunctionNode | None:
        """Return the method that a call surely means."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        plain = isinstance(owner, ast.Name) and (owner.id == "self" or len(self.script.kinds.get(owner.id, ())) == 1)
        function = self.script.called(call) if plain else None
        return function if function is not None and self.times[function.name] == 1 else None

    def definition(self, name: ast.Name) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
        """Return the only function or class of this name, where the name surely means it."""
        node = self.definitions.get(name.id) if self.times[name.id] == 1 else None
        return node if node is not None and means(self.script, name, node) else None

    def _made_with(self, kind: ast.ClassDef) -> ast.arguments | None:
        """Return the arguments of the `__init__` of a class, or of the nearest own class above it; None if not known."""
        if kind.decorator_list or kind.keywords or any(
                isinstance(item, FunctionNode) and item.name == "__new__" for item in kind.body):
            return None
        own = next((item for item in kind.body if isinstance(item, FunctionNode) and item.name == "__init__"), None)
        if own is not None:
            return own.args if not own.decorator_list else None
        first = kind.bases[0] if len(kind.bases) == 1 else None
        above = self.definition(first) if isinstance(first, ast.Name) else None
        return self._made_with(above) if isinstance(above, ast.ClassDef) and above is not kind else None


@lru_cache(maxsize=2)
def _own(script: Script) -> _Own:
    return _Own(script)


@code_rule
def unpacked_wrongly(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """As many names are filled from a function as it does not give back."""
    project = _own(script)
    for node in run_nodes(script):
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        call = node.value if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Tuple) or not isinstance(call, ast.Call) or any(
                isinstance(item, ast.Starred) for item in target.elts) or is_tried(script, node):
            continue
        function = project.definition(call.func) if isinstance(call.func, ast.Name) else project.method(call)
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            continue
        sizes = _returned(function)
        if sizes and len(target.elts) not in sizes:
            yield found("critical", target, function, name=function.name, asked=len(target.elts), given=max(sizes))


def _returned(function: ast.FunctionDef) -> set[int]:
    """Return the lengths of the tuples that a function gives back; none where it may give something else."""
    sizes = set[int]()
    for node in inside(function):
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return set()
        if isinstance(node, ast.Return):
            if not isinstance(node.value, ast.Tuple) or any(isinstance(item, ast.Starred) for item in node.value.elts):
                return set()
            sizes.add(len(node.value.elts))
    return sizes


def _file(script: Script, node: ast.AST) -> Path | None:
    module = script.module(node)
    return module.file if module is not None else None
