"""Patches of one argument: the line in which a setting stands, with another value, another name, or without it.

A line is changed only where it is certain what is changed: the name stands there once, with the very value that was read.
Everything else is left to the cure's words.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from powertrain.audit.subject import Setting, Subject
from powertrain.records.findings import Edit

_SPELLED = re.compile(r"""^["']?(?P<name>[A-Za-z_][\w.-]*)["']?\s*[=:]""")
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s,#(){}\[\]]+)"""
_NOT_READ = object()
AS_IT_IS = object()
BY_LENGTH = "group_by_length"                # what `group_by_length=True` is called in the vocabulary


def set_to(subject: Subject, key: str, value: Any) -> tuple[Edit, ...]:
    """The edit that gives `key` another value, if it is set in a line that can be changed safely."""
    found = _found(subject, key)
    if found is None:
        return ()
    place, line, match = found
    return (_edit(place, line[:match.start("value")] + _written(value, place.place.file) + line[match.end("value"):]),)


def renamed(subject: Subject, key: str, name: str, value: Any = AS_IT_IS) -> tuple[Edit, ...]:
    """The edit that gives the setting another name, and another value where one is given."""
    found = _found(subject, key, of_value=value is not AS_IT_IS)
    if found is None:
        return ()
    place, line, match = found
    if value is not AS_IT_IS:
        line = line[:match.start("value")] + _written(value, place.place.file) + line[match.end("value"):]
    return (_edit(place, line[:match.start("name")] + name + line[match.end("name"):]),)


def removed(subject: Subject, key: str) -> tuple[Edit, ...]:
    """The edit that takes the setting's line out, if nothing else stands in it."""
    found = _found(subject, key, of_value=False)
    if found is None:
        return ()
    place, line, match = found
    rest = line[:match.start("name")].strip("\"' \t") + line[match.end("value"):].split("#")[0].strip("\"', \t\n")
    return () if rest else (Edit(place.place.file, place.place.line, place.place.line, ""),)


def added(subject: Subject, beside: tuple[str, ...], name: str, value: Any) -> tuple[Edit, ...]:
    """The edit that inserts the argument `name` below the first of `beside` that has a line of a call to itself."""
    if subject.script is None:
        return ()
    for key in beside:
        found = _found(subject, key)
        if found is None:
            continue
        place, line, match = found
        if not line[:match.start("name")].strip() and line[match.end("value"):].split("#")[0].strip() == ",":
            indent = line[:match.start("name")]
            below = place.place.line + 1
            return (Edit(place.place.file, below, below - 1, f"{indent}{name}={_written(value, place.place.file)},\n"),)
    return ()


def _found(subject: Subject, key: str, *, of_value: bool = True) -> tuple[Setting, str, re.Match[str]] | None:
    """The setting, its line, and where name and value stand in it; `of_value`: only where the very value stands there."""
    setting = subject.settings.get(key)
    spelled = _SPELLED.match(setting.spelled) if setting else None
    if setting is None or spelled is None or not setting.place.line:
        return None
    lines = _lines(subject, setting.place.file)
    if setting.place.line > len(lines):
        return None
    line = lines[setting.place.line - 1]
    name = re.escape(spelled["name"])
    pattern = re.compile(rf"""(?<![\w.])(?P<quote>["']?)(?P<name>{name})(?P=quote)\s*[=:](?!=)\s*{_VALUE}""")
    matches = list(pattern.finditer(line))
    if len(matches) != 1 or (of_value and not _says(setting, matches[0]["value"])):
        return None
    return setting, line, matches[0]


def _says(setting: Setting, text: str) -> bool:
    """Whether a text is the setting's value, itself or before it got the vocabulary's word for it."""
    read = _read(text, setting.place.file)
    return bool(read == setting.value) or (read is True and setting.value == BY_LENGTH)


def _lines(subject: Subject, file: str) -> list[str]:
    if subject.script is not None and str(subject.script.path) == file:
        return subject.script.text.splitlines(keepends=True)
    try:
        return _text(file, Path(file).stat().st_mtime_ns).splitlines(keepends=True)
    except (OSError, UnicodeDecodeError):
        return []


@cache
def _text(file: str, changed_ns: int) -> str:
    del changed_ns                           # part of the key: a file that changed is read again
    return Path(file).read_text(encoding="utf-8")


def _read(text: str, file: str) -> Any:
    try:
        return ast.literal_eval(text) if file.endswith(".py") else yaml.safe_load(text)
    except (ValueError, SyntaxError, yaml.YAMLError):
        return _NOT_READ


def _written(value: Any, file: str) -> str:
    return repr(value).replace("'", '"') if file.endswith(".py") else json.dumps(value)


def _edit(setting: Setting, line: str) -> Edit:
    return Edit(setting.place.file, setting.place.line, setting.place.line, line if line.endswith("\n") else line + "\n")
