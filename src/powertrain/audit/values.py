"""What is known of a script's values, without running anything of it.

Known values are Python's own: numbers, text, booleans, None, lists. Beside them stand the dataclasses below, such as `Unread`,
which says why nothing is known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from powertrain.audit.arithmetic import MOST
from powertrain.audit.script import Setting
from powertrain.records.findings import Place

FILLED_IN = re.compile(r"[$<>{}*`]|\.\.\.")  # in a command's word: another one stands there when it is given
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")    # torchrun's variables


@dataclass(frozen=True, eq=False)
class Unread:
    """Not to be known without running the script."""

    because: str                             # "int(os.environ['WORLD_SIZE'])"
    perhaps: Any = None                      # its value, if the condition in `because` holds
    undefined: bool = False                  # a name that nothing in the script gives a value
    begins: str = ""                         # of a text: what it surely begins with, "runs/" of f"runs/{now}"


@dataclass(frozen=True)
class Reference:
    """A name of another package: torch.bfloat16."""

    name: str


class TextNumber(float):
    """A number that PyYAML reads as a text: it wants a dot before the exponent of 2e-5."""


ENVIRONMENT = Reference("os.environ")
WORDS = Reference("sys.argv")


@dataclass(eq=False)
class Table:
    """A dict that remembers where each entry stands. `open`: entries that cannot be read may be in it too."""

    entries: dict[Any, Setting] = field(default_factory=dict)
    open: str = ""
    file: str = ""                           # the config that it is read from
    doubts: int = 0                          # how many conditions were not known where it was made
    perhaps: set[Any] = field(default_factory=set)       # entries that one more condition decides on


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
    perhaps: frozenset[str] = frozenset()    # arguments that one more condition decides on

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a named argument."""
        return self.named[name].value if name in self.named else default

    def argument(self, position: int, name: str) -> Any:
        """Return an argument by place or name; None where it was not given."""
        return self.get(name, self.positional[position] if position < len(self.positional) else None)

    @property
    def last(self) -> str:
        """Return the part of the name after its last dot."""
        return self.name.rpartition(".")[2]

    @property
    def is_instance(self) -> bool:
        """Return whether the value is surely an object, as a class makes; a function may return None or False."""
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

    @property
    def lineage(self) -> list[ClassValue]:
        """Return the class and the script's own classes that it derives from, the nearest first."""
        return [self, *(each for base in self.bases if isinstance(base, ClassValue) for each in base.lineage)]

    @property
    def foreign_bases(self) -> list[str]:
        """Return the names of the classes of other packages that it derives from, the nearest first."""
        return [base.name for each in self.lineage for base in each.bases if isinstance(base, Reference)]


@dataclass(eq=False)
class Scope:
    """The names of a module or of one call of a function; as a value, a module of the script's own project."""

    names: dict[str, Any] = field(default_factory=dict)
    outer: Scope | None = None

    def find(self, name: str) -> Any:
        if name in self.names or self.outer is None:
            return self.names.get(name, Unread(name, undefined=True))
        return self.outer.find(name)


LIBRARIES = frozenset({"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "unsloth", "numpy"})


def is_known(value: Any, counter: Iterator[int] | None = None) -> bool:
    """Return whether a value is fully known: a plain Python value with all its parts, or a name of a known library.

    A value of more than MOST parts, each counted as often as it is in it, is not: a list may hold another one twice.
    """
    parts = iter(range(MOST)) if counter is None else counter
    if next(parts, None) is None:
        return False
    if isinstance(value, Reference):
        return value.name.partition(".")[0] in LIBRARIES
    if isinstance(value, (list, tuple)):
        return all(is_known(item, parts) for item in value)
    if isinstance(value, Table):
        return not value.open and all(is_known(entry.value, parts) for entry in value.entries.values())
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def plain(value: Any) -> Any:
    """Return a known value as settings hold it: `torch.bfloat16` is "bfloat16", a Table a dict."""
    if isinstance(value, Reference):
        head, _, last = value.name.rpartition(".")
        return last if head == "torch" or head.endswith(("Type", "Strategy", "TaskType")) else value.name
    if isinstance(value, Table):
        return {key: plain(entry.value) for key, entry in value.entries.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def either(a: Any, b: Any, spelled: str) -> Any:
    """Return a name's value after a branch that may or may not have run: Unread unless both values are equal."""
    if a is b or (is_known(a) and is_known(b) and type(a) is type(b) and plain(a) == plain(b)):
        return a
    said = [repr(plain(value)) if is_known(value) else value.because if isinstance(value, Unread) else None for value in (a, b)]
    return Unread(f"{said[0]} or {said[1]}, depending on {spelled}" if None not in said else f"depends on {spelled}")


def attribute(owner: Any, name: str) -> Setting | None:
    """Return an attribute of an instance or class with its place; None where it is not known."""
    if isinstance(owner, Scope):
        return Setting(owner.names[name], Place(""), name) if name in owner.names else None
    if isinstance(owner, Table):             # of OmegaConf; a plain dict has no such attributes
        return owner.entries.get(name)
    if isinstance(owner, ClassValue):
        found = next((each.fields[name] for each in owner.lineage if name in each.fields), None)
        return found if found is not None else _method(owner, name, None)
    if isinstance(owner, Made):
        if name in owner.attributes:
            found = owner.attributes[name]
            return found if isinstance(found, Setting) else None
        if owner.local is None:
            return owner.named.get(name)
        return next((each.fields[name] for each in owner.local.lineage if name in each.fields), None) or _method(
            owner.local, name, owner)
    return None


def _method(kind: ClassValue, name: str, instance: Made | None) -> Setting | None:
    """Return a method of a class, bound to its instance, or to the class itself; None where it has none."""
    method = next((each.methods[name] for each in kind.lineage if name in each.methods), None)
    if method is None:
        return None
    marks = {getattr(each, "id", "") for each in getattr(method.node, "decorator_list", ())}
    bound = kind if "classmethod" in marks else None if "staticmethod" in marks else instance
    return Setting(FunctionValue(method.node, method.scope, bound), Place("", method.node.lineno), name)


@dataclass(frozen=True)
class Arguments:
    positional: list[Any]
    named: dict[str, Setting]
    open: str = ""                           # `**kwargs` that cannot be read, as spelled
    perhaps: frozenset[str] = frozenset()    # names that are given under a condition only


def beginning(value: Any) -> str:
    """Return what a text surely begins with."""
    return value if isinstance(value, str) else value.begins if isinstance(value, Unread) else ""


def truth(value: Any) -> bool | None:
    """Return whether a value counts as true; None where that is not known."""
    if isinstance(value, Unread) or (isinstance(value, Made) and not value.is_instance):
        return None
    if isinstance(value, Table):
        return True if value.entries else None if value.open else False
    return bool(value) if isinstance(value, (list, tuple)) or is_known(value) else True


def known_word(word: str) -> Any:
    """Return a word of a command; Unread where a shell puts something else in its place, such as `$LR`."""
    return Unread(word) if FILLED_IN.search(word) else word
