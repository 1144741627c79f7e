"""The fixes of an audit as one patch: edits that do not contradict each other, of files that still parse afterwards.

Findings are taken the worst first. One whose edits touch what an earlier one changed, or after which a file would not parse, is
left out, with the reason; its cure is still in the report. Two findings may change one line: only the characters that differ
count, so that two arguments of one call can both be mended. The original is never written.
"""

from __future__ import annotations

import difflib
import io
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

import yaml

from powertrain.audit.script import parsed
from powertrain.records import WrongUse
from powertrain.records.findings import Edit, Finding


@dataclass(frozen=True)
class Patch:
    """What the fixes of an audit come to."""

    before: Mapping[str, str]                # file -> its text
    after: Mapping[str, str]
    applied: tuple[Finding, ...]
    left_out: tuple[tuple[Finding, str], ...]        # with the reason

    def __str__(self) -> str:
        """As a unified diff, which `patch -p1` and `git apply` take."""
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
                       for file, text in self.after.items()
                       for line in difflib.unified_diff(_lines(self.before[file]), _lines(text), f"a/{file.lstrip('/')}",
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


def write_copy(patch: Patch, destination: Path) -> list[Path]:
    """Writes the patched copies: of one file to this path, of several into this folder. Never over an original."""
    written = []
    for file, text in patch.after.items():
        path = destination / Path(file).name if len(patch.after) > 1 or destination.is_dir() else destination
        if path.exists():
            what = "is the audited file itself; give" if path.resolve() == Path(file).resolve() else \
                "is there already; take it away, or give"
            raise WrongUse(f"{path} {what} another path to write the patched copy to")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as handle:
            handle.write(text)
        written.append(path)
    return written


def copy_beside(file: Path) -> Path:
    """Where the patched copy goes if nothing is said: train.py -> train.patched.py."""
    return file.with_name(f"{file.stem}.patched{file.suffix}")


def read(path: Path) -> str:
    """A file's text with the line ends that it has."""
    with path.open(encoding="utf-8", newline="") as handle:
        return handle.read()


def _change(text: str, edit: Edit) -> _Change:
    """The characters that an edit of whole lines really changes."""
    lines = _lines(text)
    first = sum(map(len, lines[:edit.first - 1]))
    old = "".join(lines[edit.first - 1:edit.last])
    new = edit.text.replace("\n", "\r\n") if "\r\n" in text and "\r\n" not in edit.text else edit.text
    if old and not old.endswith("\n") and new.endswith("\n"):
        new = new.rstrip("\r\n")                         # the last line had no end, and keeps none
    same = len(commonprefix([old, new]))                 # noqa: RUF071 (characters are what is compared)
    tail = len(commonprefix([old[same:][::-1], new[same:][::-1]]))       # noqa: RUF071
    return _Change(first + same, first + len(old) - tail, new[same:len(new) - tail])


def _problem(before: Mapping[str, str], taken: Mapping[str, Sequence[_Change]], wanted: Mapping[str, Sequence[_Change]]) -> str:
    """Why these changes cannot be made as well; "" if they can."""
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
    """Whether a script compiles, or a config can be read."""
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


def _lines(text: str) -> list[str]:
    """Lines as Python counts them, each with its end."""
    return list(io.StringIO(text, newline=""))
