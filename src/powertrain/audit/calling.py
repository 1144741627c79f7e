"""Calls of a script: those of its own functions and classes are followed with their arguments, all others are kept."""

import ast
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from powertrain.audit import command_lines, known_calls, values
from powertrain.audit.expressions import Expressions
from powertrain.audit.script import Script, Setting
from powertrain.audit.syntax import argument, every, last_name
from powertrain.audit.values import ClassValue, FunctionValue, Made, Reference, Scope, Table, Unread

DEEPEST_CALL = 25


@dataclass(eq=False)
class Written:
    """`owner.name = value`, with its place: `tokenizer.pad_token = tokenizer.eos_token`."""

    owner: Any
    name: str
    setting: Setting
    node: ast.Assign | ast.AnnAssign | ast.AugAssign
    doubts: tuple[str, ...] = ()             # the conditions, not known to hold, under which it is written


@dataclass(eq=False)
class Followed:
    """What a script was seen to do."""

    script: Script
    calls: list[Made] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    items: list[Written] = field(default_factory=list)       # `os.environ["X"] = …`
    variables: dict[str, list[Made]] = field(default_factory=dict)       # by name, all that it ever was, in any scope
    before: dict[ast.AST, list[Scope]] = field(default_factory=dict)     # what was known where a loop began, each time it did
    doubts: dict[ast.AST, tuple[str, ...]] = field(default_factory=dict)         # of each loop, as of calls
    tests: dict[ast.If, set[bool | None]] = field(default_factory=dict)  # what each condition was, each time it was met
    missing: list[tuple[ast.Subscript, str, str]] = field(default_factory=list)      # reads of a config: it, its file, the key
    refused: list[ast.AST] = field(default_factory=list)     # operators that Python refuses


class Calls(Expressions):
    """Evaluates expressions, and follows the calls in them."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.followed = Followed(script)
        self.entered: set[ast.AST] = set()
        self.instances: dict[ast.AST, Made] = {}             # by class, the last one that was made
        self.stack: list[ast.AST] = []
        self.returns: list[list[Any]] = []
        self.doubts: list[str] = []

    @abstractmethod
    def block(self, body: Sequence[ast.stmt], scope: Scope) -> bool:
        """Follow statements; return whether control leaves the block before its end."""

    def call(self, called: Any, owner: Any, node: ast.Call, arguments: values.Arguments) -> Any:
        if isinstance(called, FunctionValue):
            return self.enter(called, arguments)
        if isinstance(called, ClassValue):
            table = arguments.positional[0] if len(arguments.positional) == 1 and "dict" in called.foreign_bases else None
            return table if isinstance(table, Table) else self.instance(called, node, arguments)
        if isinstance(called, (Reference, Made)):
            name = called.name if isinstance(called, Reference) else f"{called.name}()"
        else:
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = f"{owner.name}().{method}" if isinstance(owner, Made) else self.script.name(node.func) or f".{method}"
        made = Made(name, node, arguments.positional, arguments.named, owner=called if isinstance(called, Made) else owner,
                    open=arguments.open, doubts=(*self.doubts,), perhaps=arguments.perhaps)
        self.followed.calls.append(made)
        launched = known_calls.launched(made)
        if launched is not None:                         # `notebook_launcher(train, args=(…))`, `fire.Fire(train)`
            given = command_lines.settings_of(self.script.command) if made.last == "Fire" and self.script.command else {}
            self.enter(launched[0], values.Arguments(launched[1], given))
        function, more = made.argument(0, "function"), made.get("fn_kwargs")
        if made.last in ("map", "filter") and isinstance(function, FunctionValue) and not self.doubts:   # it gets rows
            given = {str(name): each for name, each in more.entries.items()} if isinstance(more, Table) else {}
            self.enter(function, values.Arguments([Unread("a row")], given))
        value = known_calls.result(made, self.script)
        if made.last in known_calls.INTO_DATACLASSES + known_calls.FROM_A_FILE and isinstance(value, tuple):
            self.followed.calls += [item for item in value if isinstance(item, Made)]
        return value

    def enter(self, function: FunctionValue, arguments: values.Arguments) -> Any:
        """Return the result of the script's own function for these arguments."""
        node = function.node
        if self.stack.count(node) > 1 or len(self.stack) >= DEEPEST_CALL:
            return Unread("a function that calls itself")
        self.entered.add(node)
        scope = Scope(self._parameters(function, arguments), function.scope)
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        self.stack.append(node)
        self.returns.append([])
        left = self.block(node.body, scope)
        returned = self.returns.pop()
        self.stack.pop()
        if len(returned) == 1 and not left:
            returned = [*returned, None]
        return reduce(lambda one, other: values.either(one, other, "a condition"), returned) if returned else None

    def _parameters(self, function: FunctionValue, arguments: values.Arguments) -> dict[str, Any]:
        spec = function.node.args
        names = [item.arg for item in (*spec.posonlyargs, *spec.args)]
        values = [function.bound, *arguments.positional] if function.bound is not None else arguments.positional
        given: dict[str, Any] = dict(zip(names, values, strict=False))
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        defaults |= {item.arg: default for item, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default}
        for name, default in defaults.items():
            if not (arguments.open and name not in given):
                given.setdefault(name, known_calls.option_default(self.value(default, function.scope)))
        every = [*names, *(item.arg for item in spec.kwonlyargs)]
        given |= {name: entry.value for name, entry in arguments.named.items() if name in every}
        if not arguments.named and not values:
            given |= self._options(function)
        if spec.vararg is not None:
            given[spec.vararg.arg] = list(values[len(names):])
        if spec.kwarg is not None:
            rest = {name: entry for name, entry in arguments.named.items() if name not in every}
            given[spec.kwarg.arg] = Table(dict(rest), arguments.open)
        for name, value in given.items():
            self._remember(name, value)
        return {name: given.get(name, Unread(name)) for name in (*every, *given)}

    def _options(self, function: FunctionValue) -> dict[str, Any]:
        """Return what parameters have that nobody gives: a dataclass, the default of `@click.option("--size", default=4)`."""
        names = [item.arg for item in (*function.node.args.args, *function.node.args.kwonlyargs)]
        given = command_lines.settings_of(self.script.command) if self.script.command is not None else {}
        decorated = bool(getattr(function.node, "decorator_list", []))       # by click or typer
        found: dict[str, Any] = {name: each.value for name, each in given.items() if decorated and name in names}
        module = self.script.module(function.node)
        folder = (module.file if module is not None else self.script.path).parent
        composed = command_lines.of_hydra(function.node, self.script, folder)
        if composed is not None and names:
            found[names[0]] = composed
        for item in (*function.node.args.args, *function.node.args.kwonlyargs):
            kind = self.value(item.annotation, function.scope) if isinstance(item.annotation, ast.Name) else None
            if isinstance(kind, ClassValue) and self._has_defaults(function, kind.node):
                found[item.arg] = self.instance(kind, item, values.Arguments([], {}))
        for item in getattr(function.node, "decorator_list", []):
            if isinstance(item, ast.Call) and self.script.name(item) == "click.option":
                default = argument(item, "default")
                long = next((str(flag.value) for flag in item.args if isinstance(flag, ast.Constant)
                             and str(flag.value).startswith("--")), "")
                if long and default is not None:
                    name = long.partition("/")[0].lstrip("-").replace("-", "_")
                    found.setdefault(name, self.value(default, function.scope))
        return found

    def _has_defaults(self, function: FunctionValue, kind: ast.ClassDef) -> bool:
        """Return whether a dataclass has a value for each field, and nothing here makes one or hands the function on."""
        marks = [last_name(each.func if isinstance(each, ast.Call) else each) for each in kind.decorator_list]
        full = all(item.value is not None for item in kind.body if isinstance(item, ast.AnnAssign))
        name = getattr(function.node, "name", "")
        loaded = {node.id for node in every(ast.Name, self.script.tree) if isinstance(node.ctx, ast.Load)}
        made = any(isinstance(call.func, ast.Name) and call.func.id == kind.name for call in every(ast.Call, self.script.tree))
        started = name in loaded or bool(getattr(function.node, "decorator_list", []))
        return marks == ["dataclass"] and full and not made and not started

    def instance(self, kind: ClassValue, node: ast.AST, arguments: values.Arguments) -> Made:
        """Return an instance of the script's own class: fields with defaults, then passed values, then `__init__`."""
        foreign = known_calls.foreign_base(kind)
        named = known_calls.all_fields(kind) | arguments.named
        made = Made(foreign or kind.node.name, node, arguments.positional, named, dict(named), local=kind, open=arguments.open,
                    doubts=(*self.doubts,), perhaps=arguments.perhaps)
        method = values.attribute(made, "__init__")
        self.instances[kind.node] = made
        if method is not None and isinstance(method.value, FunctionValue):
            self.enter(method.value, arguments)
        else:
            for name, value in zip(known_calls.all_fields(kind), arguments.positional, strict=False):
                made.named[name] = made.attributes[name] = self.script.setting(node, value)
        if foreign or any(name.endswith("Trainer") for name in kind.foreign_bases):
            self.followed.calls.append(made)
        return made

    def _remember(self, name: str, value: Any) -> None:
        if isinstance(value, Made):
            self.followed.variables.setdefault(name, []).append(value)
