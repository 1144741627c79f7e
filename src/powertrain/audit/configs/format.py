"""What a config format is: the keys that its trainer has, which of them give it away, and what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from powertrain.audit.configs.marked import Marked, shown
from powertrain.audit.configs.vocabulary import in_section
from powertrain.audit.subject import Framework, Setting, Subject
from powertrain.records.findings import Place

Told = tuple[str, Any]                       # (key of the shared vocabulary, value)
Read = Callable[[Any], Told | list[Told]]


@dataclass(frozen=True)
class Format:
    """One kind of config file."""

    name: str                                # "an Axolotl YAML"
    framework: Framework
    own: frozenset[str]                      # top-level keys that no other format has
    known: frozenset[str]                    # all dotted keys of the trainer; a key ending in ".*" stands for all under it
    renamed: Mapping[str, str] = field(default_factory=dict)     # its key -> the vocabulary's
    read: Mapping[str, Read] = field(default_factory=dict)       # its key -> what its value says, where that changes too
    whole: frozenset[str] = frozenset()      # tables that are one value
    wants: Callable[[Marked], bool] | None = None                # what else has to hold of its file
    tables: Mapping[str, str] = field(default_factory=dict)      # its table -> the vocabulary's section
    section: str = ""                        # of all its keys, which then keep their names; "": what each is about decides

    def points(self, found: Marked) -> tuple[int, float]:
        """(keys that give the format away, share of all keys that its trainer has)."""
        if self.wants is not None and not self.wants(found):
            return 0, 0.0
        keys = list(found.inner)
        known = sum(self.has_top(key) for key in keys)
        return sum(key in self.own for key in keys), known / max(1, len(keys))

    def has_top(self, key: str) -> bool:
        return key in self.known or any(name.startswith(f"{key}.") for name in self.known)

    def has(self, key: str) -> bool:
        if key in self.known:
            return True
        parts = key.split(".")
        return any(".".join([*parts[:end], "*"]) in self.known for end in range(1, len(parts)))

    def subject(self, path: Path, found: Marked) -> Subject:
        settings: dict[str, Setting] = {}
        unknown: dict[str, Setting] = {}
        said_by: dict[str, str] = {}         # the vocabulary's key -> the file's
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
        return Subject(path, self.framework, settings, unknown=unknown)

    def tell(self, key: str, value: Marked) -> list[Told]:
        if key in self.read:
            told = self.read[key](value.value)
            return told if isinstance(told, list) else [told]
        table, _, rest = key.partition(".")
        if rest and table in self.tables:
            return [(f"{self.tables[table]}.{rest}", value.value)]
        usual = f"{self.section}.{key}" if self.section else in_section(key)
        return [(self.renamed.get(key, usual), value.value)]

    def meant(self, key: str) -> str:
        """` (did you mean X?)`, where there is a key that is spelled nearly so."""
        names = [name for name in self.known if not name.endswith("*")]
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
        if not near:
            near = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
        return f" (did you mean {near[0]}?)" if near else ""


def leaves(found: Marked, config: Format, prefix: str = "") -> Iterator[tuple[str, Marked]]:
    """Dotted keys and their values, tables opened, except those that are one value."""
    for key, value in found.inner.items():
        name = f"{prefix}{key}"
        if value.inner and name not in config.whole:
            yield from leaves(value, config, f"{name}.")
        else:
            yield name, value


def names(text: str) -> frozenset[str]:
    """Keys that are written one after the other."""
    return frozenset(text.split())
