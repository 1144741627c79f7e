"""Edits of an audited file, and the patch that the edits of several findings make.

A setting's line is changed only where it is certain what is changed: the name stands there once, with the very value that was
read. A statement is changed only where it has its lines to itself. Everything else is left to the cure's words.

A patch takes findings the worst first. A finding is left out, with the reason, if its edits touch what an earlier one changed
or if the file would not parse afterwards; its cure is still in the report. Two findings may change one line: only the
characters that differ count, so that two arguments of one call can both be mended. The original is never written.
"""

import ast
import difflib
import io
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import yaml

from powertrain.audit.parsing import parsed
from powertrain.audit.script import Script
from powertrain.audit.subject import Setting, Subject
from powertrain.records import WrongUse
from powertrain.records.findings import Edit, Finding

Edits = tuple[Edit, ...]
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s,#(){}\[\]]+)"""
AS_IT_IS = object()
BY_LENGTH = "group_by_length"                # what `group_by_length=True` is called in the vocabulary
BLOCKS = ("body", "orelse", "finalbody")


def set_to(subject: Subject, key: str, value: Any, name: str = "", beside: tuple[str, ...] = ()) -> Edits:
    """Return the edit that gives `key` another value, if it is set in a line that can be changed safely.

    Where a script does not set it, the argument `name` is inserted below the first of `beside` that has a line of a call to
    itself.
    """
    if key in subject.settings or subject.script is None:
        return renamed(subject, key, "", value)
    for found in (_found(subject, other) for other in beside):
        if found is None:
            continue
        setting, line, match = found
        indentation = line[:match.start("name")]
        if not indentation.strip() and line[match.end("value"):].split("#")[0].strip() == ",":
            below, file = setting.place.line + 1, setting.place.file
            return (Edit(file, below, below - 1, f"{indentation}{name}={_written(value, file)},\n"),)
    return ()


def renamed(subject: Subject, key: str, name: str, value: Any = AS_IT_IS) -> Edits:
    """Return the edit that gives the setting another name (""; the same), and another value where one is given."""
    found = _found(subject, key, of_value=value is not AS_IT_IS)
    if found is None:
        return ()
    setting, line, match = found
    if value is not AS_IT_IS:
        line = line[:match.start("value")] + _written(value, setting.place.file) + line[match.end("value"):]
    line = line[:match.start("name")] + (name or match["name"]) + line[match.end("name"):]
    return (Edit(setting.place.file, setting.place.line, setting.place.line, line if line.endswith("\n") else line + "\n"),)


def removed(subject: Subject, key: str) -> Edits:
    """Return the edit that takes the setting's line out, if nothing else stands in it."""
    found = _found(subject, key, of_value=False)
    if found is None:
        return ()
    setting, line, match = found
    rest = line[:match.start("name")].strip("\"' \t") + line[match.end("value"):].split("#")[0].strip("\"', \t\n")
    return () if rest else (Edit(setting.place.file, setting.place.line, setting.place.line, ""),)


def _found(subject: Subject, key: str, *, of_value: bool = True) -> tuple[Setting, str, re.Match[str]] | None:
    """Return the setting, its line, and where name and value stand in it; `of_value`: only where that very value stands."""
    setting = subject.settings.get(key)
    if setting is None or not setting.name or not setting.place.line:
        return None
    lines = lines_of(subject, setting.place.file)
    if setting.place.line > len(lines):
        return None
    line = lines[setting.place.line - 1]
    name = re.escape(setting.name)
    pattern = re.compile(rf"""(?<![\w.])(?P<quote>["']?)(?P<name>{name})(?P=quote)\s*[=:](?!=)\s*{_VALUE}""")
    matches = list(pattern.finditer(line))
    if len(matches) != 1 or (of_value and not _says(setting, matches[0]["value"])):
        return None
    return setting, line, matches[0]


def _says(setting: Setting, text: str) -> bool:
    """Return whether a text reads as the setting's value, or as a value that the vocabulary translates to it."""
    try:
        read = ast.literal_eval(text) if setting.place.file.endswith(".py") else yaml.safe_load(text)
    except (ValueError, SyntaxError, yaml.YAMLError):
        return False
    return bool(read == setting.value) or (read is True and setting.value == BY_LENGTH)


def lines_of(subject: Subject, file: str) -> list[str]:
    """Return the lines of one of the subject's files, each with its end; none of a file that cannot be read."""
    if subject.script is not None and str(subject.script.path) == file:
        return subject.script.own_text.splitlines(keepends=True)
    with suppress(OSError, UnicodeDecodeError):
        return Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
    return []


def _written(value: Any, file: str) -> str:
    return repr(value).replace("'", '"') if file.endswith(".py") else json.dumps(value)


def without(script: Script, *nodes: ast.AST) -> Edits:
    """Return the edits that take the statements of these nodes out; `pass` where a block would be empty."""
    statements = list(dict.fromkeys(map(script.statement, nodes)))
    if any(map(script.module, nodes)) or not all(_is_alone(script, statement) for statement in statements):
        return ()
    edits = []
    for number, statement in enumerate(statements):
        block = block_of(script, statement)
        empties = all(other in statements for other in block) and not any(other in block for other in statements[:number])
        text = f"{indent(script, statement)}pass\n" if empties else ""
        edits.append(Edit(str(script.path), statement.lineno, last_line(statement), text))
    return tuple(edits)


def with_line(script: Script, node: ast.AST, text: str, *, after: bool = False) -> Edits:
    """Return the edit that puts a line of its own before the statement of a node, or after it, indented as it is."""
    statement = script.statement(node)
    if script.module(node) or not _is_alone(script, statement):
        return ()
    line = last_line(statement) + 1 if after else first_line(statement)
    ended = not after or script.lines[line - 2].endswith("\n")
    return (Edit(str(script.path), line, line - 1, f"{'' if ended else chr(10)}{indent(script, statement)}{text}\n"),)


def moved(script: Script, node: ast.AST, target: ast.AST, text: str, *, after: bool = False) -> Edits:
    """Return the edits that take a statement out and write `text` before or after another one; none where one is unsafe."""
    taken, put = without(script, node), with_line(script, target, text, after=after)
    return (*taken, *put) if taken and put else ()


def with_text(script: Script, node: ast.expr, text: str) -> Edits:
    """Return the edit that puts another text in place of an expression, which has to stand in one line."""
    if node.end_lineno != node.lineno or script.module(node):
        return ()
    line = script.lines[node.lineno - 1]
    first, last = column(line, node.col_offset), column(line, node.end_col_offset or 0)
    return (Edit(str(script.path), node.lineno, node.lineno, line[:first] + text + line[last:]),)


def with_argument(script: Script, call: ast.Call, name: str, text: str) -> Edits:
    """Return the edit that adds a keyword argument to a call as its last, or changes it where the call has it."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return with_text(script, keyword.value, text)
    if script.module(call):
        return ()
    given: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
    last = max(given, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0), default=call)
    number = last.end_lineno or 0
    line = script.lines[number - 1]
    at = column(line, last.end_col_offset or 0)
    if not given:
        return (Edit(str(script.path), number, number, f"{line[:at - 1]}{name}={text}{line[at - 1:]}"),)
    at += len(line[at:]) - len(line[at:].lstrip(")")) if isinstance(last, ast.Starred) else 0
    if number == (call.end_lineno or 0) or line[at:at + 1] in (",", ")"):
        return (Edit(str(script.path), number, number, f"{line[:at]}, {name}={text}{line[at:]}"),)
    return ()


def indented(script: Script, statements: Sequence[ast.stmt], by: str) -> Edits:
    """Return the edit that moves statements that follow each other, and what stands between them, to the right."""
    if script.module(statements[0]):
        return ()
    first, last = first_line(statements[0]), last_line(statements[-1])
    text = "".join(by + line if line.strip() else line for line in script.lines[first - 1:last])
    return (Edit(str(script.path), first, last, text),)


def with_import(script: Script, module: str) -> Edits:
    """Return the edit that writes `import module` above the script's first import, where it is not imported yet."""
    if script.imported.get(module) == module:
        return ()
    first = next((node for node in script.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
                  and getattr(node, "module", "") != "__future__"), None)
    return with_line(script, first, f"import {module}") if first is not None else ()


def block_of(script: Script, statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements among which one stands."""
    blocks = (getattr(script.parents[statement], name, None) for name in BLOCKS)
    return next((block for block in blocks if isinstance(block, list) and statement in block), [statement])


def indent(script: Script, statement: ast.stmt) -> str:
    line = script.lines[first_line(statement) - 1]
    return line[:len(line) - len(line.lstrip())]


def first_line(statement: ast.stmt) -> int:
    """Return the line in which a statement begins, decorators included."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def column(line: str, offset: int) -> int:
    """Return the characters before a column that ast counts in bytes."""
    return len(line.encode()[:offset].decode())


def _is_alone(script: Script, statement: ast.stmt) -> bool:
    """Return whether a statement has its lines to itself, unlike `a; b` and `if x: a`."""
    line = script.lines[first_line(statement) - 1]
    after = script.lines[last_line(statement) - 1].encode()[statement.end_col_offset or 0:].decode().strip()
    return not line.encode()[:statement.col_offset].decode().strip() and (not after or after.startswith("#"))


@dataclass(frozen=True)
class Patch:
    """What the fixes of an audit come to."""

    before: Mapping[str, str]                # file -> its text
    after: Mapping[str, str]
    applied: tuple[Finding, ...]
    left_out: tuple[tuple[Finding, str], ...]        # with the reason

    def __str__(self) -> str:
        """Return the patch as a unified diff, which `patch -p1` and `git apply` take."""
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
                       for file, text in self.after.items()
                       for line in difflib.unified_diff(_ended(self.before[file]), _ended(text), f"a/{file.lstrip('/')}",
                                                        f"b/{file.lstrip('/')}") if text != self.before[file])


@dataclass(frozen=True, order=True)
class _Change:
    """Characters `first` to `last` of a file become `text`."""

    first: int
    last: int
    text: str


def make_patch(findings: Iterable[Finding]) -> Patch:
    before: dict[str, str] = {}
    taken: dict[str, list[_Change]] = {}
    applied, left_out = [], []
    for finding in findings:
        if not finding.cure.edits:
            continue
        wanted: dict[str, list[_Change]] = {}
        for edit in finding.cure.edits:
            if edit.file not in before:
                before[edit.file] = read(Path(edit.file))
            wanted.setdefault(edit.file, []).append(_change(before[edit.file], edit))
        problem = _problem(before, taken, wanted)
        if problem:
            left_out.append((finding, problem))
            continue
        for file, changes in wanted.items():
            taken[file] = _joined(taken.get(file, ()), changes)
        applied.append(finding)
    return Patch(before, {file: _changed(text, taken.get(file, ())) for file, text in before.items()}, tuple(applied),
                 tuple(left_out))


def write_copy(file: str, text: str, destination: Path) -> Path:
    """Write a file's patched text to this path, or into this folder, and return where it is. Never over an original."""
    path = destination / Path(file).name if destination.is_dir() else destination
    if path.exists():
        what = "is the audited file itself; give" if path.resolve() == Path(file).resolve() else \
            "is there already; take it away, or give"
        raise WrongUse(f"{path} {what} another path to write the patched copy to")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")
    return path


def copy_beside(file: Path) -> Path:
    """Return the default path of the patched copy: train.py -> train.patched.py."""
    return file.with_name(f"{file.stem}.patched{file.suffix}")


def read(path: Path) -> str:
    """Return a file's text with its line ends unchanged."""
    with path.open(encoding="utf-8", newline="") as handle:
        return handle.read()


def _change(text: str, edit: Edit) -> _Change:
    """Return an edit of whole lines as a change of only those characters that differ."""
    lines = _ended(text)
    first = sum(map(len, lines[:edit.first - 1]))
    old = "".join(lines[edit.first - 1:edit.last])
    new = edit.text.replace("\n", "\r\n") if "\r\n" in text and "\r\n" not in edit.text else edit.text
    if old and not old.endswith("\n") and new.endswith("\n"):
        new = new.rstrip("\r\n")                         # the last line had no end, and keeps none
    same = len(commonprefix([old, new]))                 # noqa: RUF071 (characters are what is compared)
    tail = len(commonprefix([old[same:][::-1], new[same:][::-1]]))       # noqa: RUF071
    return _Change(first + same, first + len(old) - tail, new[same:len(new) - tail])


def _problem(before: Mapping[str, str], taken: Mapping[str, Sequence[_Change]], wanted: Mapping[str, Sequence[_Change]]) -> str:
    """Return why these changes cannot be added to those already taken; "" if they can."""
    for file, changes in wanted.items():
        for change in changes:
            others = [other for other in taken.get(file, ()) if other != change]
            if any(change.first < other.last and other.first < change.last for other in others):
                return "another fix changes the same place"
        text = _changed(before[file], _joined(taken.get(file, ()), changes))
        if parses(before[file], file) and not parses(text, file):
            return "with the other fixes the file would no longer parse"
    return ""


def _joined(taken: Iterable[_Change], changes: Iterable[_Change]) -> list[_Change]:
    return list(dict.fromkeys([*taken, *changes]))       # the same change twice is one: two fixes may want it


def _changed(text: str, changes: Iterable[_Change]) -> str:
    # from the end, so that positions before a change hold; of changes at one place the first taken comes first
    numbered = sorted(enumerate(changes), key=lambda item: (item[1].first, item[1].last, item[0]), reverse=True)
    for _, change in numbered:
        text = text[:change.first] + change.text + text[change.last:]
    return text


def parses(text: str, file: str) -> bool:
    """Return whether a script compiles, or a config can be read."""
    try:
        if file.endswith(".py"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(parsed(text), file, "exec", dont_inherit=True)       # also finds an argument that is given twice
        elif file.endswith(".json"):
            json.loads(text)
        else:
            yaml.compose(text, Loader=yaml.SafeLoader)
    except (SyntaxError, ValueError, yaml.YAMLError):
        return False
    return True


def _ended(text: str) -> list[str]:
    """Return the lines of a text as Python counts them, each with its line end."""
    return list(io.StringIO(text, newline=""))
