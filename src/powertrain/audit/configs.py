"""Configs of any trainer as subjects: the keys tell which format a file has, and the reason is said.

formats.yaml says which keys give each format away, and which tables it has; recipe/vocabulary.md, what keys a trainer has and
what they are called here. Each value knows its line; nothing is executed or constructed. PyYAML's nodes carry the marks, for
JSON too: its comments and tabs, which YAML refuses, are blanked first. ruamel.yaml was tried and not kept: it rewrites 6 to 50
lines of a public config that it only reads and writes, and its marks say no more.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from powertrain.audit.config_values import Told, told
from powertrain.audit.expressions import Expressions
from powertrain.audit.parsing import read_text
from powertrain.audit.project import parse
from powertrain.audit.subject import Framework, Setting, Subject
from powertrain.audit.values import Scope, is_known, plain
from powertrain.recipe import spellings
from powertrain.recipe.plain_yaml import LONGEST_NUMBER, Yaml
from powertrain.recipe.schema import known_keys
from powertrain.recipe.vocabulary import find, keys_of
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean
from powertrain.records.findings import Place

SUFFIXES = (".yaml", ".yml", ".json")       # of configs that are no Python
SETTINGS = ("techniques.", "optimizer.", "objective.")        # of a recipe, which their own tables check
LEAST_KNOWN = 0.5                            # share of a file's keys that its trainer has; below, it is another one's file
MOST_NODES = 20_000                          # with all aliases opened
LONGEST_NAME = 255                           # of a file
# what documents and editors put into JSON: comments, tabs, a comma before a closing bracket; strings are left alone
_NOT_JSON = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|\t|,(?=\s*[}\]])', re.DOTALL)
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class Marked:
    """A value, and the line (from 1) of the key that it is set by."""

    value: Any                               # plain: None, bool, int, float, str, list, dict
    line: int
    inner: Mapping[str, Marked] = field(default_factory=dict)    # of a table


def read_marked(path: Path, *, doubles: bool = False) -> Marked:
    """Return the table of a YAML or JSON file. Raises WrongUse if it cannot be read or holds something else.

    `doubles`: of a key that is there twice the last one counts, as for PyYAML, and is not refused.
    """
    text = read_text(path, "config")
    found = _read_yaml(_checked_json(text, path) if text.lstrip().startswith("{") else text, path, doubles)
    if not isinstance(found.value, dict):
        kind = "a list" if isinstance(found.value, list) else "a text" if isinstance(found.value, str) else \
            f"the value {shown(found.value)}"
        raise WrongUse(f"{path} is not a config: it holds {kind}, and not keys with values")
    return found


def read_assigned(path: Path) -> Marked:
    """Return the names that a Python file, or a class in it, sets to literals, as configs of document 004 and nanoGPT do."""
    script = replace(parse(path), imported={})
    read, found = Expressions(script), dict[str, Marked]()
    of_classes = (item for owner in script.tree.body if isinstance(owner, ast.ClassDef) for item in owner.body)
    for node in (*script.tree.body, *of_classes):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value, targets = read.value(node.value, Scope()), node.targets if isinstance(node, ast.Assign) else [node.target]
            said = Marked(printable(value) if isinstance(value, str) else plain(value), node.lineno)
            found |= {target.id: said for target in targets if is_known(value) and isinstance(target, ast.Name)}
    return Marked({name: each.value for name, each in found.items()}, 1, found)


def shown(value: Any) -> str:
    """Return a value as a config writes it, on one short line."""
    text = printable(json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else
                      " ".join(value.split()))
    return text if len(text) <= 100 else f"{text[:97]}..."


def _checked_json(text: str, path: Path) -> str:
    """Return JSON as YAML reads it. Raises WrongUse if it is not JSON, comments and last commas aside."""
    for _ in range(2):                       # a comment may stand between the last comma and its bracket
        text = _NOT_JSON.sub(lambda found: found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0]), text)
    try:
        json.loads(text, strict=False)
    except ValueError as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise WrongUse(f"{path}{line} is not JSON: {getattr(error, 'msg', error)}") from None
    return text


def _read_yaml(text: str, path: Path, doubles: bool) -> Marked:
    try:
        node = yaml.compose(text, Loader=Yaml)
        if node is None:
            return Marked({}, 1)
        return _from_node(node, node.start_mark.line + 1, Yaml(""), iter(range(MOST_NODES)), path, doubles)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        raise WrongUse(f"{path}{line} is not YAML: {problem}") from None


def _from_node(node: yaml.Node, line: int, loader: Yaml, budget: Iterator[int], path: Path, doubles: bool) -> Marked:
    if next(budget, None) is None:
        raise WrongUse(f"{path} unfolds to more than {MOST_NODES:,} values; take its aliases out")
    if isinstance(node, yaml.MappingNode):
        if not doubles:
            _refuse_doubles(node, path)
        loader.flatten_mapping(node)         # `<<: *defaults`; what is merged comes first, and what is written here last
        inner = {printable(str(key.value)): _from_node(value, key.start_mark.line + 1, loader, budget, path, doubles)
                 for key, value in node.value}
        return Marked({name: each.value for name, each in inner.items()}, line, inner)
    if isinstance(node, yaml.SequenceNode):
        return Marked([_from_node(item, line, loader, budget, path, doubles).value for item in node.value], line)
    return Marked(_scalar(node, loader), line)


def _refuse_doubles(node: yaml.MappingNode, path: Path) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise WrongUse(f"{path}:{line} has a list or a table as a key; a config's keys are words")
        if name in lines:
            raise WrongUse(f"{path}:{line} sets {name} a second time (line {lines[name]} does so too), and only one of the two "
                           "would count; keep one")
        lines[name] = line


def printable(text: str) -> str:
    """Return the text with a replacement character for what no terminal can print and no YAML may hold."""
    return _UNPRINTABLE.sub("\ufffd", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _scalar(node: yaml.Node, loader: Yaml) -> Any:
    """Return a number, boolean, None or text; a date, a foreign tag and a number too long for one stay text."""
    if str(node.tag).rpartition(":")[2] in ("null", "bool", "int", "float") and len(node.value) <= LONGEST_NUMBER:
        with suppress(ValueError, LookupError, yaml.YAMLError):      # `!!int word`
            return loader.construct_object(node)
    return printable(str(node.value))


@dataclass(frozen=True)
class Format:
    """One kind of config file."""

    name: str                                # "an Axolotl YAML"
    framework: Framework
    trainer: str                             # its name in the vocabulary, most often the framework's
    own: frozenset[str]                      # top-level keys that no other format has
    whole: frozenset[str] = frozenset()      # tables that are one value
    optional_table: str = ""                 # a table that some files leave out: its keys stand at the top too
    section: str = ""                        # of all its keys, which then keep their names; "": the vocabulary decides

    @property
    def keys(self) -> list[str]:
        return keys_of(self.trainer)

    def points(self, found: Marked) -> tuple[int, float]:
        """Return how many keys give the format away, and the share of all keys that its trainer has."""
        if self.framework in WANTS and not WANTS[self.framework](found):
            return 0, 0.0
        known = sum(self.has_top(key) for key in found.inner)
        return sum(key in self.own for key in found.inner), known / max(1, len(found.inner))

    def has_top(self, key: str) -> bool:
        return self.has(key) or self.has(f"{key}.") or key == self.optional_table or any(
            name.startswith(f"{key}.") for name in self.keys)

    def has(self, key: str) -> bool:
        if self.section:
            key = key.partition(".")[0]
        elif self.optional_table:
            key = key.removeprefix(f"{self.optional_table}.")
        return find(key, self.trainer) is not None

    def subject(self, path: Path, found: Marked) -> Subject:
        """Return the file's settings, each with its line."""
        settings: dict[str, Setting] = {}
        unknown: dict[str, Setting] = {}
        said_by: dict[str, str] = {}         # the audit's key -> the file's
        for key, value in leaves(found, self):
            place, spelled = Place(str(path), value.line), f"{key.rpartition('.')[2]}: {shown(value.value)}"
            if not self.has(key):
                unknown[key] = Setting(value.value, place, spelled + self.meant(key))
                continue
            told = self.tell(key, value)
            for name, item in told:
                setting = Setting(item, place, spelled)
                if name not in settings:
                    settings[name], said_by[name] = setting, key
                elif item is None or settings[name].value is not None:
                    if len(told) == 1:       # a second spelling: the one that says something counts, the other keeps its name
                        settings.setdefault(f"training.{key}", replace(setting, value=value.value))
                else:
                    settings.setdefault(f"training.{said_by[name]}", settings[name])
                    settings[name], said_by[name] = setting, key
        return Subject(path, self.framework, settings, unknown=unknown, keys=found.inner)

    def tell(self, key: str, value: Marked) -> list[Told]:
        """Return what a key says in the audit's names."""
        if self.section:
            return [(f"{self.section}.{key}", value.value)]
        return told(key.removeprefix(f"{self.optional_table}.") if self.optional_table else key, value.value, self.trainer)

    def meant(self, key: str) -> str:
        """Return ` (did you mean X?)` if there is a key that is spelled nearly so."""
        same_leaf = [f"did you mean {name}?" for name in self.keys if name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = did_you_mean(key, self.keys, likeness=0.75, otherwise=next(iter(same_leaf), ""))
        return f" ({hint.removeprefix('; ')})" if hint else ""


def leaves(found: Marked, config: Format, prefix: str = "") -> Iterator[tuple[str, Marked]]:
    """Yield dotted keys and their values; tables are opened unless they are one value."""
    for key, value in found.inner.items():
        name = f"{prefix}{key}"
        if value.inner and name not in config.whole:
            yield from leaves(value, config, f"{name}.")
        else:
            yield name, value


class _Recipe(Format):
    """A recipe also takes the keys of other trainers."""

    def points(self, found: Marked) -> tuple[int, float]:
        """Return (points, share); (0, 0.0) if the file has only foreign keys, or a `model:` that other trainers write too."""
        points, share = super().points(found)
        model = found.inner.get("model")
        shared = model is not None and not any(self.has(f"model.{key}") for key in model.inner)
        return (points, share) if points > shared else (0, 0.0)

    def has_top(self, key: str) -> bool:
        return super().has_top(key) or any(name.startswith(f"{key}.") for name in _OURS)

    def has(self, key: str) -> bool:
        return key in _OURS or key.startswith(SETTINGS) or super().has(key) or spellings.is_known(key)

    def tell(self, key: str, value: Marked) -> list[Told]:
        if find(key, "powertrain") is not None:
            is_pin = key.startswith("techniques.") and value.value in ("on", "off")
            return super().tell(key, replace(value, value=value.value == "on") if is_pin else value)
        if key in _OURS or key.startswith(SETTINGS):
            return [(key if "." in key else f"training.{key}", value.value)]
        return told(key.rpartition(".")[2], value.value, None)


_OURS = frozenset(known_keys()) | {"techniques", "data", "model"}
_NOT_A_RECIPE = frozenset(("fp16", "bf16", "optimizer", "scheduler", "training", "zero_optimization", "noise", "sampling",
                           "datasets"))


def _may_be_recipe(found: Marked) -> bool:
    """Return whether a file may be a recipe: it has no table that only other trainers write, as DeepSpeed's files have."""
    foreign = any(found.inner[key].inner for key in _NOT_A_RECIPE & set(found.inner))
    return not foreign and "zero_optimization" not in found.inner


# what else must hold of a file of some frameworks
WANTS: Mapping[str, Callable[[Marked], bool]] = {
    "powertrain": _may_be_recipe,
    "axolotl": lambda found: isinstance(found.value.get("datasets", []), list),
    "lora-trainer": lambda found: not isinstance(found.value.get("datasets"), dict) and "training" not in found.inner,
    "character-transformer": lambda found: all(isinstance(found.value.get(key, {}), dict)
                                               for key in ("training", "model", "datasets")),
    "torchtune": lambda found: any("_component_" in value.inner for value in found.inner.values())}


def _read_formats() -> dict[str, Format]:
    text = (resources.files("powertrain") / "audit" / "formats.yaml").read_text(encoding="utf-8")
    found = {}
    for name, said in yaml.safe_load(text).items():
        kind = _Recipe if name == "powertrain" else Format
        sets = {key: frozenset(said[key].split()) for key in ("own", "whole") if key in said}
        found[name] = kind(**{"framework": name, "trainer": said.get("framework", name), **said, **sets})
    return found


_BY_NAME = _read_formats()
FORMATS = tuple(_BY_NAME.values())
HUGGING_FACE = (_BY_NAME["transformers"], _BY_NAME["trl"])


def read_config(path: Path) -> Subject:
    """Return the settings of a config file, each with its line. Raises WrongUse if the file fits no known format."""
    found = read_assigned(path) if path.suffix == ".py" else read_marked(path)
    subject = recognise(found, path)[0].subject(path, found)
    # with the keys of the DeepSpeed file that it names, where that lies beside it
    named = subject.value("training.deepspeed")
    file = path.parent / named if isinstance(named, str) and len(named) <= LONGEST_NAME else None
    if file is None or not file.is_file():
        return subject
    theirs = _BY_NAME["deepspeed"].subject(file, read_marked(file))
    return replace(subject, settings={**theirs.settings, **subject.settings}, unknown={**theirs.unknown, **subject.unknown})


def why_recognised(path: Path) -> str:
    """Return in one sentence which format the file has, and which of its keys show that."""
    config, why = recognise(read_assigned(path) if path.suffix == ".py" else read_marked(path), path)
    return f"{config.name}: {why}"


def recognise(found: Marked, path: Path) -> tuple[Format, str]:
    """Return the format that has most of the file's keys (of equals, most that only it has), and the reason."""
    if not found.inner:
        raise WrongUse(f"{path} sets nothing: a config has keys with values")
    ranked = sorted(FORMATS, key=lambda config: (config.points(found)[1], config.points(found)[0]), reverse=True)
    best, (points, share) = ranked[0], ranked[0].points(found)
    equal = [config for config in ranked if config.points(found) == (points, share)]
    if share < LEAST_KNOWN:
        raise WrongUse(f"{path} is no config that is known here: its keys ({_listed(list(found.inner))}) fit {best.name} "
                       f"best, which has {share:.0%} of them; known formats: {', '.join(config.name for config in FORMATS)}")
    if points == 0 and (plain := [config for config in equal if config in HUGGING_FACE]):
        return plain[0], "all of its keys are Hugging Face's, and none is another trainer's alone" if share == 1 else \
            f"{share:.0%} of its keys are Hugging Face's, and none is another trainer's alone"
    if len(equal) > 1 and not set(equal) <= set(HUGGING_FACE):
        deciding = "; ".join(f"{sorted(config.own)[0]} ({config.name})" for config in equal)
        raise WrongUse(f"{path} may be {' or '.join(config.name for config in equal)}: its keys "
                       f"({_listed(list(found.inner))}) fit them equally; {deciding} would decide it")
    given_away = [key for key in found.inner if key in best.own]
    return best, f"{_listed(given_away)} {'is' if len(given_away) == 1 else 'are'} among its keys" if given_away else \
        f"it has {share:.0%} of the file's keys, more than any other"


def _listed(keys: Sequence[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")
