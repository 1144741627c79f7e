"""What an expression of a script can be known to be without running it.

Known values are Python's own: numbers, text, booleans, None, lists. Beside them: a `Table` (a dict whose entries remember where
they stand), what a call of somebody else's code made (`Made`), a name of another package (`Reference`), the script's own
functions and classes, and `Unread`, which says why nothing is known. Unread is contagious: nothing is guessed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from powertrain.audit.script import Setting
from powertrain.records.findings import Place


@dataclass(frozen=True, eq=False)
class Unread:
    """Not to be known without running the script."""

    because: str                             # "int(os.environ['WORLD_SIZE'])"
    perhaps: Any = None                      # its value, if the condition in `because` holds


@dataclass(frozen=True)
class Reference:
    """A name of another package: torch.bfloat16."""

    name: str


@dataclass(eq=False)
class Table:
    """A dict that remembers where each entry stands. `open`: entries that cannot be read may be in it too."""

    entries: dict[Any, Setting] = field(default_factory=dict)
    open: str = ""


@dataclass(eq=False)
class Made:
    """What a call of code outside the script, or of one of its classes, gave. Attributes set later are kept."""

    name: str                                # "transformers.TrainingArguments"
    node: ast.AST
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Setting] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    owner: Any = None                        # of a method's result: whose method it was
    local: ClassValue | None = None          # of an instance of the script's own class
    open: str = ""                           # `**kwargs` that cannot be read, as spelled
    doubts: tuple[str, ...] = ()             # the conditions, not known to hold, under which it is called

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a named argument."""
        return self.named[name].value if name in self.named else default

    def argument(self, position: int, name: str) -> Any:
        """Return an argument by place or name; None where it was not given."""
        return self.get(name, self.positional[position] if position < len(self.positional) else None)

    @property
    def last(self) -> str:
        """The name without what stands before its last dot."""
        return self.name.rpartition(".")[2]

    @property
    def is_instance(self) -> bool:
        """Whether it is surely an object, as what a class makes; what a function returns may be None or False."""
        return self.local is not None or self.last[:1].isupper() or self.name.endswith("from_pretrained")


@dataclass(eq=False)
class FunctionValue:
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    bound: Any = None                        # of a method: its instance


@dataclass(eq=False)
class ClassValue:
    node: ast.ClassDef
    scope: Scope
    bases: list[Any] = field(default_factory=list)
    fields: dict[str, Setting] = field(default_factory=dict)         # class attributes; of a dataclass its defaults
    methods: dict[str, FunctionValue] = field(default_factory=dict)

    def method(self, name: str) -> FunctionValue | None:
        """Return a method of the class, or of the first of its bases that is the script's own."""
        base = next((each for each in self.bases if isinstance(each, ClassValue)), None)
        return self.methods[name] if name in self.methods else base.method(name) if base else None


@dataclass(eq=False)
class Scope:
    """The names of a module or of one call of a function."""

    names: dict[str, Any] = field(default_factory=dict)
    outer: Scope | None = None

    def find(self, name: str) -> Any:
        if name in self.names or self.outer is None:
            return self.names.get(name, Unread(name))
        return self.outer.find(name)


LIBRARIES = frozenset({"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "unsloth", "numpy"})


def is_known(value: Any) -> bool:
    """Whether a value is one of Python's own, through and through, or a name of a library that has one meaning."""
    if isinstance(value, Reference):
        return value.name.partition(".")[0] in LIBRARIES
    if isinstance(value, (list, tuple)):
        return all(is_known(item) for item in value)
    if isinstance(value, Table):
        return not value.open and all(is_known(entry.value) for entry in value.entries.values())
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def plain(value: Any) -> Any:
    """A known value as settings hold it: `torch.bfloat16` is "bfloat16", a Table a dict."""
    if isinstance(value, Reference):
        head, _, last = value.name.rpartition(".")
        return last if head == "torch" or head.endswith(("Type", "Strategy", "TaskType")) else value.name
    if isinstance(value, Table):
        return {key: plain(entry.value) for key, entry in value.entries.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return is_known(a) and is_known(b) and type(a) is type(b) and bool(plain(a) == plain(b))


def either(a: Any, b: Any, spelled: str) -> Any:
    """What a name is after a branch of which it is not known whether it was taken."""
    if same(a, b):
        return a
    said = [repr(plain(value)) if is_known(value) else value.because if isinstance(value, Unread) else None for value in (a, b)]
    return Unread(f"{said[0]} or {said[1]}, depending on {spelled}" if None not in said else f"depends on {spelled}")


def attribute(owner: Any, name: str) -> Setting | None:
    """An attribute of an instance or class, where it is known, with its place."""
    if isinstance(owner, Made):
        if name in owner.attributes:
            found = owner.attributes[name]
            return found if isinstance(found, Setting) else None
        if owner.local is None:
            return owner.named.get(name)
        found, method = attribute(owner.local, name), owner.local.method(name)
        if found is None and method is not None:         # bound to its instance
            return Setting(FunctionValue(method.node, method.scope, owner), Place("", method.node.lineno), name)
        return found
    if isinstance(owner, ClassValue):
        if name in owner.fields:
            return owner.fields[name]
        return next((found for base in owner.bases if (found := attribute(base, name)) is not None), None)
    return None
