"""A training script as syntax: its calls, loops and functions, asked by the rules that look at code.

A *training loop* is the innermost loop that takes an optimizer step, whether `backward()` stands in it or in a function of the
script that it calls. `step_code` is what runs at every step: the loop's body and the bodies of those functions.
"""

import ast
import io
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from powertrain.audit.syntax import (
    DEFINITIONS,
    FunctionNode,
    Loop,
    Node,
    closure,
    every,
    inside,
    is_backward,
    is_called,
    is_training,
    kept_by_syntax,
    last_name,
    member_of,
    never_run,
)
from powertrain.records.findings import Evidence, Place

SPELLED = re.compile(r"""(?:[\w.]+\[(?=["']))?["']?([A-Za-z_][\w.-]*)["']?\]?\s*[=:]""")   # how a file spells a setting
DEEPEST_HELPER = 3                           # functions called from a loop, and from those: as deep as scripts go


@dataclass(frozen=True)
class Setting:
    """One value, where it is set, and how the file itself spells it."""

    value: Any
    place: Place
    spelled: str                             # "fp16=True", "per_device_train_batch_size: 4"

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.spelled, self.place)

    @property
    def name(self) -> str:
        """Return the name by which the file sets it, such as fp16; "" where nothing is assigned."""
        matched = SPELLED.match(self.spelled)
        return matched[1] if matched else ""


@dataclass(frozen=True)
class Module:
    """A file of the script's own project that it imports."""

    path: Path                               # as it is shown
    file: Path                               # resolved
    text: str
    tree: ast.Module
    imported: Mapping[str, str]
    first: int = 0                           # its first line in the text of the whole


@dataclass(frozen=True)
class Command:
    """One command by which the project starts the script."""

    place: Place
    words: tuple[str, ...]                   # behind the script's name
    starter: tuple[str, ...]                 # before it
    called: str = ""                         # the script as the command names it: src/train.py, or src.train behind -m

    @property
    def options(self) -> Iterator[str]:
        yield from (word[2:].partition("=")[0] for word in self.words if re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", word))


@dataclass(frozen=True, eq=False)        # what is worked out of one is kept by identity
class Script:
    """A parsed script, with the modules of its project below it (project.py). Nothing of it is ever run."""

    path: Path
    text: str
    tree: ast.Module
    imported: Mapping[str, str]              # name in the script -> what it is: "F" -> "torch.nn.functional"
    sections: Mapping[str, ast.Call] = field(default_factory=dict)   # "training" -> the call that makes those settings
    kinds: Mapping[str, frozenset[str]] = field(default_factory=dict)    # variable -> what made it: "….from_pretrained"
    trained: frozenset[str] = frozenset()    # what made the model that a Trainer is given
    modules: tuple[Module, ...] = ()
    unparsed: str = ""                       # lines that Python cannot parse, and that are left out
    spread: Mapping[ast.AST, Mapping[str, Setting]] = field(default_factory=dict)    # call -> what `**` of a table gives it
    missing: tuple[tuple[ast.Subscript, str, str], ...] = ()     # reads of keys that a config lacks: where, the file, the key
    refused: tuple[ast.AST, ...] = ()        # operators that Python refuses for their operands
    notes: tuple[str, ...] = ()              # what of the project is not read, each with its cure
    project: Mapping[tuple[ast.AST, str], Path] = field(default_factory=dict)        # import -> the module's file
    root: Path | None = None                 # the project's folder
    launch: Mapping[str, str] | None = None  # the launcher's variables, of the launch that is looked at; None: not known
    shell: Path | None = None                # the shell script that starts it, where that is audited
    command: Command | None = None           # the command that is looked at; None: without options
    unused: frozenset[ast.AST] = frozenset()         # statements that the defaults of all settings never reach
    dead: frozenset[ast.AST] = frozenset()   # statements that this launch never reaches, and another one does
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)       # what is so whatever the launch
    _of_kind: dict[Any, list[Any]] = field(default_factory=dict, init=False, repr=False)

    @kept_by_syntax
    def lines(self) -> tuple[str, ...]:
        return tuple(io.StringIO(self.text, newline=""))         # str.splitlines would also split at form feeds

    @property
    def own_text(self) -> str:
        """Return the text without the modules of the project."""
        return "".join(self.lines[:self.modules[0].first - 1]) if self.modules else self.text

    @kept_by_syntax
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}

    def place(self, node: ast.AST) -> Place:
        line, module = getattr(node, "lineno", 0), self.module(node)
        return Place(str(self.path), line) if module is None else Place(str(module.path), line - module.first + 1)

    def module(self, node: ast.AST) -> Module | None:
        """Return the module of the project that a node stands in; None for the script's own."""
        line = getattr(node, "lineno", 0)
        return self.modules[at - 1] if self.modules and (at := bisect(self._firsts, line)) else None

    @kept_by_syntax
    def _firsts(self) -> list[int]:
        return [module.first for module in self.modules]

    def origin(self, node: ast.Name) -> str | None:
        """Return what a name is imported as, in the file that it stands in; None where it is not imported there."""
        module = self.module(node)
        return (self.imported if module is None else module.imported).get(node.id)

    @property
    def all_imported(self) -> set[str]:
        """Return what is imported anywhere in the project."""
        return {*self.imported.values(), *(name for module in self.modules for name in module.imported.values())}

    def words(self, node: ast.AST) -> str:
        """Return a node as the script spells it, on one line."""
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
        if not first or not last:
            return ast.unparse(node)
        lines = self._bytes[first - 1:last]              # columns count bytes, not characters
        lines[-1] = lines[-1][:getattr(node, "end_col_offset", None)]
        lines[0] = lines[0][getattr(node, "col_offset", 0):]
        return " ".join(b"".join(lines).decode().split())

    @kept_by_syntax
    def _bytes(self) -> list[bytes]:
        return [line.encode() for line in self.lines]

    def evidence(self, node: ast.AST) -> Evidence:
        return Evidence(self.words(node), self.place(node))

    def setting(self, node: ast.AST, value: Any) -> Setting:
        """Return a value as a setting that stands at a node."""
        return Setting(value, self.place(node), self.words(node))

    def name(self, node: ast.AST) -> str:
        """Return a node's dotted name, its import resolved: `F.cross_entropy` -> torch.nn.functional.cross_entropy.

        The name of a call is that of what is called; "" for what has no name, such as `layers[0]`.
        """
        if isinstance(node, ast.Call):
            return self.name(node.func)
        if isinstance(node, ast.Name):
            return self.origin(node) or node.id
        if isinstance(node, ast.Attribute):
            owner = self.name(node.value) if not isinstance(node.value, ast.Call) else f"{self.name(node.value)}()"
            return f"{owner}.{node.attr}" if owner else f".{node.attr}"
        return ""

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield calls of any of these resolved dotted names; ".backward", with a dot first, is a method of any object."""
        mine = sorted(one for end in {name.rpartition(".")[2] for name in names} for one in self._calls.get(end, ()))
        return (call for _, name, call in mine if is_called(name, names))

    @cached_property
    def _calls(self) -> Mapping[str, list[tuple[int, str, ast.Call]]]:
        """Return (place among all, name, call) of the calls, by the last part of their names."""
        found: dict[str, list[tuple[int, str, ast.Call]]] = {}
        for at, call in enumerate(self.every(ast.Call)):
            found.setdefault((name := self.name(call)).rpartition(".")[2], []).append((at, name, call))
        return found

    def has_call(self, *names: str) -> bool:
        return next(self.calls(*names), None) is not None

    def is_made_by(self, node: ast.AST, *endings: str) -> bool:
        """Return whether a variable or attribute comes from a call whose dotted name ends in one of these."""
        return any(kind.endswith(endings) for kind in self.kinds.get(last_name(node), ()))

    def has_made(self, *endings: str) -> bool:
        """Return whether any variable comes from a call whose dotted name ends in one of these."""
        return any(kind.endswith(endings) for kinds in self.kinds.values() for kind in kinds)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Return the syntax that a training run reaches, without docstrings: only this code is evidence."""
        texts = {node.value for node in every(ast.Expr, self.tree) if isinstance(node.value, ast.Constant)}
        never = never_run(self.tree, in_cells=self.path.suffix != ".py")
        dead = {inner for statement in (*self.dead, *never) for inner in ast.walk(statement)}
        return tuple(node for node in ast.walk(self.tree) if node not in texts and node not in dead and self.is_reached(node))

    def every(self, kind: type[Node]) -> list[Node]:
        """Return the nodes of one type that a training run reaches."""
        if kind not in self._of_kind:
            self._of_kind[kind] = [node for node in self.nodes if isinstance(node, kind)]
        return self._of_kind[kind]

    def is_reached(self, node: ast.AST) -> bool:
        """Return whether a node belongs to the module itself or to a function that a training run may call."""
        function = node if isinstance(node, FunctionNode) else self.function(node)
        return self.module(node) is None if self._reachable is None else function is None or function in self._reachable

    @property
    def trains(self) -> bool:
        """Return whether the script makes a Trainer or its arguments, or calls backward()."""
        return self._reachable is not None

    @kept_by_syntax
    def _reachable(self) -> frozenset[FunctionNode] | None:
        """Return the functions around the training, those that lead to it, and all that these name; None without training."""
        functions = [node for node in ast.walk(self.tree) if isinstance(node, FunctionNode)]
        by_name: dict[str, list[FunctionNode]] = {}
        for function in functions:
            by_name.setdefault(function.name, []).append(function)
        for name, kind in self.classes.items():
            by_name.setdefault(name, []).extend(self.methods(kind))

        def named_in(node: ast.AST) -> set[FunctionNode]:
            """Return the functions of the names in a node's own code, and all methods of classes of these names."""
            own = inside(node, FunctionNode | ast.ClassDef)          # lambdas are called by what is given them
            names = {str(getattr(item, "id", getattr(item, "attr", ""))) for item in own}
            names |= {item.name for item in ast.walk(node) if isinstance(item, ast.FunctionDef) and item.decorator_list}
            return {function for name in names if not name.startswith("__") for function in by_name.get(name, ())}

        reach = {function: named_in(function) for function in functions}
        own = [function for function in functions if self.module(function) is None]      # a project has other trainings too
        mine = closure([*own, *named_in(self.tree)], reach) if self.modules else set(functions)
        training = {function for function in mine if any(is_training(node) for node in inside(function))}
        if not training and not any(is_training(node) for node in inside(self.tree)):
            return None
        callers = {function: {each for each in mine if function in reach[each]} for function in mine}
        return frozenset(closure([*closure([*training], callers), *named_in(self.tree)], reach))

    @cached_property
    def _said(self) -> str:
        """Return every name and text of the code that training reaches, for `says`."""
        named = (getattr(node, name, None) for node in self.nodes for name in ("id", "attr", "arg", "name", "value", "module"))
        return "\n".join(text for text in named if isinstance(text, str))

    def says(self, *words: str) -> bool:
        """Return whether a name or text of the code contains one of these words; comments and docstrings do not count."""
        return any(word in self._said for word in words)

    def behind(self, *nodes: ast.AST) -> list[ast.AST]:
        """Return the nodes that a value comes from: an expression's own, and those of all values assigned to its names."""
        found, waiting, seen = list[ast.AST](), list(nodes), set[str]()
        while waiting:
            for node in ast.walk(waiting.pop()):
                found.append(node)
                name = self._dotted(node)
                if name and name not in seen:
                    seen.add(name)
                    waiting += self._assigned.get(name, [])
        return found

    def assigned(self, node: ast.AST) -> list[ast.expr]:
        """Return the values that are assigned to a name or attribute anywhere."""
        return self._assigned.get(name, []) if (name := self._dotted(node)) else []

    def _dotted(self, node: ast.AST) -> str:
        """Return the source of a name such as `steps` or `args.steps`; "" for anything else."""
        return ast.unparse(node) if isinstance(node, ast.Name) or (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)) else ""

    @kept_by_syntax
    def _assigned(self) -> Mapping[str, list[ast.expr]]:
        """Return the values that are assigned to each name anywhere."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found.setdefault(self._dotted(target), []).append(node.value)
        return found

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def is_within(self, node: ast.AST, outer: ast.AST) -> bool:
        return node is outer or any(around is outer for around in self.ancestors(node))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node belongs to."""
        return next(around for around in (node, *self.ancestors(node)) if isinstance(around, ast.stmt))

    def function(self, node: ast.AST) -> FunctionNode | None:
        return next((around for around in self.ancestors(node) if isinstance(around, FunctionNode)), None)

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        return next((around for around in self.ancestors(node) if isinstance(around, ast.ClassDef)), None)

    def _around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield what a node stands in within its function, the innermost first, each with the part of it that has the node."""
        chain = [node, *takewhile(lambda around: not isinstance(around, FunctionNode), self.ancestors(node))]
        yield from zip(chain[1:], chain, strict=False)

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops around a node, without a `for` that iterates over it: the node then runs once, before the loop."""
        return [around for around, inner in self._around(node) if isinstance(around, Loop)
                and not (isinstance(around, ast.For) and inner is around.iter)]

    def conditions(self, node: ast.AST) -> list[ast.If]:
        """Return the `if`s around a node, without an `if` whose own test holds the node."""
        return [around for around, inner in self._around(node) if isinstance(around, ast.If) and inner is not around.test]

    @kept_by_syntax
    def functions(self) -> Mapping[str, FunctionNode]:
        """Return the script's functions and methods by name; where several share one, its own before a module's, no method."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, FunctionNode)]
        return {node.name: node for node in sorted(found, key=lambda one: (
            self.module(one) is None, not isinstance(self.parents[one], ast.ClassDef)))}

    @kept_by_syntax
    def classes(self) -> Mapping[str, ast.ClassDef]:
        """Return the project's classes by name; the last one if several share a name."""
        return {node.name: node for node in every(ast.ClassDef, self.tree)}

    @kept_by_syntax
    def shared_names(self) -> frozenset[str]:
        """Return the names that several classes of the project have."""
        times = Counter(node.name for node in every(ast.ClassDef, self.tree))
        return frozenset(name for name, number in times.items() if number > 1)

    def methods(self, kind: ast.ClassDef, seen: tuple[ast.ClassDef, ...] = ()) -> list[FunctionNode]:
        """Return the methods that the project gives objects of a class, those of the classes above it too."""
        above = [self.classes[last_name(base)] for base in kind.bases if last_name(base) in self.classes]
        return [*(item for item in kind.body if isinstance(item, FunctionNode)),
                *(item for base in above if base not in (*seen, kind) for item in self.methods(base, (*seen, kind)))]

    def of_module(self, node: ast.Attribute) -> FunctionNode | ast.ClassDef | None:
        """Return the project's function or class that `module.name` stands for."""
        first = next(iter(every(ast.Name, node)), None) if self.modules else None
        dotted = self.name(node.value) if first is not None and self.origin(first) is not None else ""
        return member_of([(module.file, module.tree) for module in self.modules], dotted, node.attr) if dotted else None

    def called(self, call: ast.Call) -> FunctionNode | None:
        """Return the project's own function that a call runs: `step(…)`, `self.step(…)`, `trainer.step(…)`, `utils.step(…)`."""
        if not isinstance(call.func, ast.Attribute):
            return self.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
        owner, name, there = call.func.value, call.func.attr, self.of_module(call.func)
        if there is not None:
            return there if isinstance(there, FunctionNode) else None
        if isinstance(owner, ast.Name) and owner.id == "self":
            inherited = self.methods(around) if (around := self.class_around(call)) is not None else []
            return next((each for each in inherited if each.name == name), self.functions.get(name))
        of_self = isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "self"
        kinds = self.kinds.get(last_name(owner), frozenset()) if of_self or isinstance(owner, ast.Name) else frozenset()
        return next((each for kind in kinds if kind in self.classes for each in self.methods(self.classes[kind])
                     if each.name == name), None)

    def callers(self, function: FunctionNode | None) -> list[ast.Call]:
        """Return the calls of one of the script's own functions, in the code that training reaches."""
        return [call for call in self.every(ast.Call) if self.called(call) is function] if function is not None else []

    def reached(self, *nodes: ast.AST, but: Any = DEFINITIONS) -> Iterator[ast.AST]:
        """Yield these nodes, all nodes `inside` them, and those of the script's functions that are called there."""
        for node in nodes:
            yield node
            seen, waiting = set[ast.AST](), [(node, 0)]
            while waiting:
                top, depth = waiting.pop(0)
                for inner in inside(top, but):
                    yield inner
                    function = self.called(inner) if isinstance(inner, ast.Call) else None
                    if function is not None and function not in seen and depth < DEEPEST_HELPER:
                        seen.add(function)
                        waiting.append((function, depth + 1))

    @cached_property
    def training_loops(self) -> tuple[Loop, ...]:
        """Return the loops over batches: each the innermost around a `backward()`, or a call of a function with one."""
        return tuple(node for node in ast.walk(self.tree) if isinstance(node, Loop)
                     and (self.module(node) is None or self.is_reached(node))
                     and any(is_backward(inner) for inner in self.reached(node, but=DEFINITIONS | Loop)))
